"""A hundred JSON schemas of many kinds, bounded so that answers end; and the keyword of each that must be refused."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

SHORT: Schema = {"type": "string", "maxLength": 8}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 99}
FLAG: Schema = {"type": "boolean"}
COLOUR: Schema = {"enum": ["red", "green", "blue"]}


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Schema:
    """An object of these properties and no others, all of them there unless said otherwise."""
    wanted = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": wanted,
        "additionalProperties": False,
        **more,
    }


def listed(items: Any, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


POINT = closed({"x": COUNT, "y": COUNT})

HELD: tuple[Schema, ...] = (
    # Plain values
    FLAG,
    {"type": "null"},
    COUNT,
    SHORT,
    {"type": ["integer", "null"], "minimum": 1, "maximum": 9},
    {"type": ["boolean", "null"]},
    {"const": "yes"},
    {"const": 3},
    {"const": {"a": [1, None, "b"]}},
    {"const": None},
    COLOUR,
    {"enum": [1, "one", None, True, [1], {"a": 1}]},
    {"enum": ["Zoë", "日本", "😀", 'a "quote"', "back\\slash", "line\nbreak"]},
    {"type": "string", "enum": ["small", "medium", "large"]},
    # Numbers
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 20},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": "integer", "minimum": 1000, "maximum": 1999, "multipleOf": 5},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 100},
    closed({"price": {"type": "number", "minimum": 0.5, "maximum": 9.5, "multipleOf": 0.5}}),
    closed({"year": {"type": "integer", "minimum": 1900, "maximum": 2100}}),
    # Strings
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": "string", "minLength": 1, "maxLength": 1},
    {"type": "string", "maxLength": 0},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
    {"type": "string", "pattern": "^(foo|bar){1,3}$"},
    {"type": "string", "pattern": "^\\d{3}-\\d{4}$"},
    {"type": "string", "pattern": "^[a-z]+$", "maxLength": 8},
    {"type": "string", "pattern": "^#[0-9a-fA-F]{6}$"},
    {"type": "string", "pattern": "^[αβγδ]{1,5}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    closed({"id": {"type": "string", "format": "uuid"}, "born": {"type": "string", "format": "date"}}),
    # Objects
    closed({"name": SHORT, "age": COUNT}),
    closed({"name": SHORT, "age": COUNT, "alive": FLAG}, required=["name"]),
    closed({"a": COUNT, "b": COUNT, "c": COUNT, "d": COUNT}, required=[]),
    closed({"b": COUNT, "a": COUNT}, required=["a"]),
    closed({}),
    closed({"person": closed({"name": SHORT, "home": closed({"street": SHORT, "number": COUNT})})}),
    closed({"a": closed({"b": closed({"c": closed({"d": FLAG})})})}),
    closed({"key with space": FLAG, 'quote"d': FLAG, "ünïcode": FLAG}),
    closed({f"field_{index}": FLAG for index in range(12)}),
    closed({"kind": {"const": "circle"}, "radius": COUNT}),
    closed({"empty": closed({}), "nothing": {"type": "null"}}),
    {"type": "object", "properties": {"a": COUNT}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "additionalProperties": False},
    {"type": "object", "patternProperties": {"^x[0-9]$": FLAG}, "properties": {"y": FLAG}, "required": ["y"],
     "additionalProperties": False},
    closed({"title": {"title": "A title", "description": "What it is called", **SHORT}}, title="Book"),
    closed({"unit": {"default": "m", "examples": ["m", "km"], "enum": ["m", "km"]}}, description="A unit"),
    {"$schema": "https://json-schema.org/draft/2020-12/schema", **closed({"ok": FLAG})},
    # Arrays
    listed(COUNT),
    listed(COUNT, most=4, least=4),
    listed(COLOUR, most=5, least=1),
    listed(listed(FLAG, most=2), most=2),
    listed(POINT, most=2, least=1),
    listed(SHORT, most=2),
    {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [COUNT, SHORT, FLAG], "items": False, "minItems": 3},
    {"type": "array", "prefixItems": [COLOUR, COUNT], "items": FLAG, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [COUNT, COUNT], "items": False},
    closed({"tags": listed(COLOUR), "points": listed(POINT, most=2)}),
    closed({"matrix": listed(listed(COUNT, most=2, least=2), most=2, least=2)}),
    # Unions
    {"anyOf": [COUNT, FLAG]},
    {"anyOf": [COUNT, {"type": "null"}]},
    {"anyOf": [POINT, COLOUR, listed(FLAG, most=2)]},
    {"anyOf": [closed({"a": COUNT}), closed({"b": COUNT})]},
    {"anyOf": [{"const": 1}, {"const": 11}, {"const": 111}]},
    {"oneOf": [{"type": "string", "maxLength": 5}, COUNT]},
    {"oneOf": [closed({"kind": {"const": "cat"}, "lives": COUNT}), closed({"kind": {"const": "dog"}, "good": FLAG})]},
    {"oneOf": [{"type": "null"}, FLAG, POINT]},
    closed({"value": {"anyOf": [SHORT, COUNT, {"type": "null"}]}}),
    closed({"pet": {"oneOf": [{"const": "cat"}, {"const": "dog"}], "discriminator": {"propertyName": "kind"}}}),
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    {"allOf": [{"type": "object", "properties": {"a": FLAG}, "required": ["a"]},
               closed({"a": FLAG, "b": COUNT}, required=["b"])]},
    {"type": ["string", "integer"], "maxLength": 4, "minimum": 0, "maximum": 50},
    # References
    {"$defs": {"colour": COLOUR}, **closed({"front": {"$ref": "#/$defs/colour"}, "back": {"$ref": "#/$defs/colour"}})},
    {"$defs": {"point": POINT}, "$ref": "#/$defs/point"},
    {"definitions": {"flag": FLAG}, **listed({"$ref": "#/definitions/flag"}, most=3, least=1)},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": COUNT}, **closed({"n": {"$ref": "#/$defs/a"}})},
    {"$defs": {"node": closed({"value": COUNT, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})},
     "$ref": "#/$defs/node"},
    {"$defs": {"tree": closed({"leaf": FLAG, "children": listed({"$ref": "#/$defs/tree"}, most=1)}, required=["leaf"])},
     **closed({"root": {"$ref": "#/$defs/tree"}})},
    closed({"first": COLOUR, "second": {"$ref": "#/properties/first"}}),
    # As tools write them
    {"$defs": {"Step": closed({"explanation": SHORT, "output": SHORT}, title="Step")},
     **closed({"steps": listed({"$ref": "#/$defs/Step"}, most=2, least=1), "final_answer": SHORT}, title="Reasoning")},
    closed({"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}}),
    closed({"sentiment": {"enum": ["good", "bad"]}, "score": {"type": "integer", "minimum": 1, "maximum": 5},
            "quotes": listed(SHORT, most=2)}),
    closed({"rows": listed({"type": "array", "prefixItems": [COUNT, COLOUR], "items": False, "minItems": 2}, most=2)}),
    closed({"id": COUNT, "owner": {"anyOf": [closed({"name": SHORT}), {"type": "null"}], "default": None}}),
    closed({"event": SHORT, "when": {"type": "string", "format": "date"}, "guests": listed(SHORT, most=2, least=1)}),
)  # fmt: skip

REFUSED: tuple[tuple[str, Schema], ...] = (
    ("uniqueItems", {"type": "array", "items": COUNT, "maxItems": 3, "uniqueItems": True}),
    ("not", {"not": {"type": "string"}}),
    ("if", {"if": {"required": ["a"]}, **closed({"a": FLAG})}),
    ("contains", {"type": "array", "contains": COUNT, "maxItems": 3}),
    ("dependentRequired", closed({"a": FLAG, "b": FLAG}, dependentRequired={"a": ["b"]})),
    ("minProperties", closed({"a": FLAG, "b": FLAG}, required=[], minProperties=1)),
    ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": FLAG}),
    ("format", {"type": "string", "format": "credit-card"}),
)
