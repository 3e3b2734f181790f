"""The JSON schema of a body whose fields may be null, and of the fields that are known but do nothing. Pure.

pydantic writes the types, ranges and lengths of the fields that we take. What `schema.Fields` adds to them
is added here too: null means absent for every field that has a default, and a neutral field takes its neutral
values. So a field declared there is in the document without another word, but for its description (`field_words`).
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from coordinator.openai.field_words import WORDS
from coordinator.openai.neutral_fields import Neutral

TOKEN_ID = "token-id"
"""The `format` of token ids: the document gives them the range of the served model's vocabulary."""


def describe_body(schema: dict[str, Any], cls: type[BaseModel]) -> None:
    """A `json_schema_extra` of pydantic: changes `schema`, the one of `cls`, in place."""
    properties = schema.setdefault("properties", {})
    fields = {field.alias or name: field for name, field in cls.model_fields.items()}
    for name, value in properties.items():
        properties[name] = _described(value, fields[name])
        properties[name]["description"] = WORDS.get(f"{cls.__name__}.{name}") or WORDS.get(name, "")
    neutral: Neutral = getattr(cls, "NEUTRAL", {})
    properties.update({name: neutral_field(values) for name, values in neutral.items()})
    schema["description"] = WORDS.get(cls.__name__, "")


def _described(schema: dict[str, Any], field: FieldInfo) -> dict[str, Any]:
    bare = {key: value for key, value in schema.items() if key not in ("title", "default")}
    if field.is_required():
        return bare
    default = field.get_default(call_default_factory=True, validated_data={})
    return or_null(bare) if default is None else {**or_null(bare), "default": default}


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, which null fits too."""
    null = {"type": "null"}
    if "anyOf" in schema:
        others = [branch for branch in schema["anyOf"] if branch != null]
        if len(others) > 1:
            return {**schema, "anyOf": [*others, null]}
        schema = {**{key: value for key, value in schema.items() if key != "anyOf"}, **others[0]}
    if "enum" in schema or "const" in schema or not isinstance(schema.get("type"), str):
        return {"anyOf": [schema, null]}
    return {**schema, "type": [schema["type"], "null"]}


def neutral_field(values: tuple[Any, ...]) -> dict[str, Any]:
    """What asks for nothing: these values and null."""
    said = " or ".join(json.dumps(value) for value in (*values, None))
    return {"enum": [*values, None], "description": f"Known and without effect here: {said} only."}
