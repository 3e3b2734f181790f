"""Whether every keyword of a JSON schema is one that answers can be held to. Pure.

JSON Schema says that an unknown keyword means nothing, and the grammar library does the same; here "minLenght" would
then be ignored in silence. So each keyword is either held to, or known to assert nothing, or refused by name. What
the values of the held ones must be is the library's to judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from coordinator.errors_http import shown

HELD: Final = frozenset({
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions",
    "properties", "required", "additionalProperties", "patternProperties",
    "items", "prefixItems", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
})  # fmt: skip
ASSERTS_NOTHING: Final = frozenset({
    "title", "description", "default", "examples", "$schema", "$id", "$comment",
    "readOnly", "writeOnly", "deprecated", "discriminator",
})  # fmt: skip
SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
LISTS_OF_SCHEMAS: Final = ("prefixItems", "anyOf", "oneOf", "allOf")
SCHEMAS: Final = ("items", "additionalProperties")
_WAY_TO_A_SCHEMA: Final = re.compile(
    rf"#(/({'|'.join(map(re.escape, SCHEMAS_BY_NAME))})/[^/]+"
    rf"|/({'|'.join(LISTS_OF_SCHEMAS)})/\d+|/({'|'.join(SCHEMAS)}))*"
)
"""A `$ref` to anywhere else (into `examples`, say) would lead past this file's look."""


def first_fault(schema: Any) -> str | None:
    """The first keyword that cannot be held to, where it stands and why, as a sentence without its end."""
    for place, found in _schemas(schema, ""):
        if isinstance(found, bool):
            continue
        if not isinstance(found, dict):
            return f"{_at(place)}must be an object or a boolean"
        for keyword, value in found.items():
            fault = _fault(keyword, value)
            if fault is not None:
                return f"{_at(place)}{shown(keyword)}: {fault}"
    return None


def _fault(keyword: str, value: Any) -> str | None:
    if keyword in ASSERTS_NOTHING or (keyword.startswith("x-") and keyword != "x-guidance"):
        return None
    if keyword not in HELD:
        return "answers cannot be held to this keyword"
    if keyword == "$ref" and not (isinstance(value, str) and _WAY_TO_A_SCHEMA.fullmatch(value)):
        return "must lead to a schema of this document, such as #/$defs/name"
    if keyword in SCHEMAS_BY_NAME and not isinstance(value, dict):
        return "must be an object"
    if keyword in LISTS_OF_SCHEMAS and not isinstance(value, list):
        return "must be a list"
    if keyword == "items" and isinstance(value, list):
        return "must be one schema; a list of them is called prefixItems"
    return None


def _schemas(schema: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The schema and all inside it, with the way to each. Values (enum, const, default, examples) are not schemas."""
    yield place, schema
    if not isinstance(schema, dict):
        return
    for keyword in SCHEMAS:
        if keyword in schema and not isinstance(schema[keyword], list):
            yield from _schemas(schema[keyword], f"{place}.{keyword}")
    for keyword in LISTS_OF_SCHEMAS:
        if isinstance(schema.get(keyword), list):
            for index, inner in enumerate(schema[keyword]):
                yield from _schemas(inner, f"{place}.{keyword}[{index}]")
    for keyword in SCHEMAS_BY_NAME:
        if isinstance(schema.get(keyword), dict):
            for name, inner in schema[keyword].items():
                yield from _schemas(inner, f"{place}.{keyword}.{shown(name)}")


def _at(place: str) -> str:
    return f"at {place[1:]}, " if place else ""
