"""Bodies made from a schema, at the edges of its ranges, and bodies with one thing in them that is not as it says."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from random import Random
from typing import Any, cast

from jsonschema import Draft202012Validator, validators

STRANGE: list[Any] = [
    None, True, False, 0, 1, -1, -0.0, 1.0, 0.5, 1e-9, 2**31, 2**63, 2**64, 1e308, "", "1", "x", "😀", "a" * 513,
    "é" * 1000, [], {}, [None], [[]], [""], ["a"], [1], [1.0], [True], [-1], [[1]], [[1], [2]], ["a", 1], {"a": 1},
    {"1": 1}, {"1": 101}, {"type": "text"}, {"type": "text", "text": "x"}, [{"type": "text", "text": "x"}],
    [{"type": "image_url"}], ["a"] * 17, list(range(129)), {"include_usage": True},
]  # fmt: skip
LONGEST = 200
TRIES = 50
MOST_OBJECTS = 3


def _is_integer(_: Any, value: Any) -> bool:
    """To JSON schema 1.0 is an integer, to us it is none: the document says so in words."""
    return isinstance(value, int) and not isinstance(value, bool)


Strict = validators.extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)


def validator(document: dict[str, Any], name: str) -> Draft202012Validator:
    """For one of the document's schemas."""
    root = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return cast(Draft202012Validator, Strict(root))


class Bodies:
    """Made from the schema `name` of `document`, always the same for a seed."""

    def __init__(self, document: dict[str, Any], name: str, seed: int) -> None:
        self._schemas = document["components"]["schemas"]
        self._name = name
        self._random = Random(seed)

    def one_by_one(self) -> Iterator[dict[str, Any]]:
        """The least body, and in it each field with each value at the borders of its schema and each strange one."""
        schema = self._schemas[self._name]
        # Small ones: they stand in thousands of bodies.
        draws = {
            name: [self._value(schema["properties"][name]) for _ in range(9)] for name in schema["required"]
        }
        least = {name: min(values, key=lambda value: len(str(value))) for name, values in draws.items()}
        for index, (name, said) in enumerate(schema["properties"].items()):
            # Of the many fields that only take null and the like each meets a third of what is strange.
            strange = STRANGE[index % 3 :: 3] if "enum" in said else STRANGE
            for value in [*said.get("enum", self._edges(said)), *strange]:
                yield {**least, name: value}

    def fitting(self) -> dict[str, Any]:
        body: dict[str, Any] = self._object(self._schemas[self._name])
        return body

    def odd(self) -> dict[str, Any]:
        """A body in which one value, somewhere, is another one, is gone, or has a stranger beside it."""
        body = copy.deepcopy(self.fitting())
        holder, key = self._random.choice(_places(body))
        kind = self._random.random()
        if kind < 0.1:
            del holder[key]
        elif kind < 0.2 and isinstance(holder, dict):
            holder["unknown"] = None
        elif kind < 0.6 and holder is body:
            holder[key] = self._random.choice(
                self._edges(self._schemas[self._name]["properties"].get(key, {}))
            )
        else:
            holder[key] = self._random.choice(STRANGE)
        return body

    # ------------------------------------------------------------ values of a schema

    def _value(self, schema: dict[str, Any]) -> Any:
        if "$ref" in schema:
            return self._value(self._schemas[schema["$ref"].rsplit("/", 1)[1]])
        if "anyOf" in schema:
            return self._value(self._random.choice(schema["anyOf"]))
        if "enum" in schema:
            return self._random.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        if schema.get("type") == "object" or "properties" in schema:
            return self._object(schema)
        # What is inside an array fits already, and may refer to schemas of the document.
        fits = Strict({key: value for key, value in schema.items() if key != "items"})
        return self._random.choice([edge for edge in self._edges(schema) if fits.is_valid(edge)])

    def _object(self, schema: dict[str, Any]) -> dict[str, Any]:
        """One that keeps the rules between its fields, if chance finds one."""
        rules = Strict({"allOf": schema["allOf"]}) if "allOf" in schema else None
        for _ in range(TRIES):
            made = self._any_object(schema)
            if rules is None or rules.is_valid(made):
                break
        return made

    def _any_object(self, schema: dict[str, Any]) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        optional = [name for name in properties if name not in required]
        chosen = self._random.sample(optional, self._random.randint(0, min(5, len(optional))))
        made = {name: self._value(properties[name]) for name in [*required, *chosen]}
        if isinstance(schema.get("additionalProperties"), dict):
            keys = [str(self._random.randint(0, 40_000)) for _ in range(self._random.randint(0, 3))]
            made |= {key: self._value(schema["additionalProperties"]) for key in keys}
        return made

    def _edges(self, schema: dict[str, Any]) -> list[Any]:
        """Values at the borders of a schema, on both sides."""
        if "anyOf" in schema:
            return [edge for branch in schema["anyOf"] for edge in self._edges(branch)]
        if "enum" in schema or "const" in schema or "$ref" in schema:
            return STRANGE
        kinds = schema.get("type", [])
        edges: list[Any] = []
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            edges += self._edges_of(kind, schema)
        return edges or STRANGE

    def _edges_of(self, kind: str, schema: dict[str, Any]) -> list[Any]:
        match kind:
            case "null":
                return [None]
            case "boolean":
                return [True, False]
            case "integer" | "number":
                return _numbers(kind, schema)
            case "string":
                lengths = {*_lengths(schema, "minLength", "maxLength"), 3}
                plain = ["a_1"] if "pattern" in schema else []
                return plain + ["aé😀 "[index % 4] * length for index, length in enumerate(sorted(lengths))]
            case "array":
                lengths = {*_lengths(schema, "minItems", "maxItems"), 1, 2}
                if "$ref" in schema["items"]:  # objects hold lists of objects: long ones would never end
                    lengths = {length for length in lengths if length <= MOST_OBJECTS}
                elif schema["items"].get("type") != "integer":  # a validator takes long over many long ones
                    lengths = {n for n in lengths if n < 50 or self._random.random() < 0.1}
                return [[self._value(schema["items"]) for _ in range(length)] for length in lengths]
            case _:
                return [self._object(schema)]


def _numbers(kind: str, schema: dict[str, Any]) -> list[Any]:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    bounds = [schema[name] for name in names if name in schema] or [0]
    if kind == "integer":
        return [bound + step for bound in bounds for step in (-1, 0, 1)]
    near = [math.nextafter(bound, to) for bound in bounds for to in (-math.inf, math.inf)]
    return [*bounds, *near, 0.75, 1]


def _lengths(schema: dict[str, Any], least: str, most: str) -> list[int]:
    bounds = [schema.get(least, 0), schema.get(most, 2)]
    return [bound + step for bound in bounds for step in (-1, 0, 1) if 0 <= bound + step <= LONGEST]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(holder, key) of everything inside a body."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    found = [(value, key) for key, _ in pairs]
    for _, inside in pairs:
        if isinstance(inside, (dict, list)):
            found += _places(inside)
    return found
