"""The document describes what is accepted and answered: no more, no less."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.openai_schema import ChatFields, TextFields

BODIES = (ChatFields, TextFields)


def schemas_of(body: type[ChatFields] | type[TextFields]) -> dict[str, Any]:
    """Name → schema of the body and of each object in it."""
    schema = body.model_json_schema()
    return {body.__name__: schema, **schema.pop("$defs", {})}


@pytest.mark.parametrize("body", BODIES)
def test_each_field_is_described(body: type[ChatFields] | type[TextFields]) -> None:
    """A field without a line: add one to `coordinator/field_words.py`."""
    silent = [
        f"{name}.{field}"
        for name, schema in schemas_of(body).items()
        for field, said in schema["properties"].items()
        if not said["description"]
    ]
    assert silent == []
    assert [name for name, schema in schemas_of(body).items() if not schema["description"]] == []


@pytest.mark.parametrize("body", BODIES)
def test_each_field_that_we_know_is_there(body: type[ChatFields] | type[TextFields]) -> None:
    properties = schemas_of(body)[body.__name__]["properties"]
    assert set(properties) == set(body.model_fields) | set(body.NEUTRAL)
    for name, values in body.NEUTRAL.items():
        assert properties[name]["enum"] == [*values, None]
        assert json.dumps(properties[name])
