"""Calls that are asked for, by a model of 135M parameters that knows no tools: forced ones come all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import FunctionToolCallArgumentsDoneEvent

from tests.e2e.service import MODEL, Service

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "get_time", "description": "What time it is"}}
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [WEATHER, CLOCK],
    "max_completion_tokens": 200,
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def sdk(undisturbed: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=undisturbed.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def check(calls: Any) -> list[tuple[str, Any]]:
    """Every call is of a known function, with arguments that its schema allows."""
    found = []
    for call in calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "get_weather":
            assert set(arguments) == {"city", "unit"}
            assert arguments["unit"] in ("celsius", "fahrenheit") and len(arguments["city"]) <= 12
        else:
            assert (call.function.name, arguments) == ("get_time", {})
        assert call.type == "function" and call.id.startswith("call_")
        found.append((call.function.name, arguments))
    return found


@pytest.mark.parametrize(
    ("choice", "finish", "temperature"), [(NAMED, "stop", 0), ("required", "tool_calls", 1)]
)
def test_a_call_that_must_be_is_one(sdk: openai.OpenAI, choice: Any, finish: str, temperature: int) -> None:
    asked = {
        **ASKED,
        "tool_choice": choice,
        "temperature": temperature,
        "seed": 7,
        "parallel_tool_calls": False,
    }
    (whole,) = sdk.chat.completions.create(**asked).choices
    assert whole.message.content is None
    assert (whole.finish_reason, len(check(whole.message.tool_calls))) == (finish, 1)
    with sdk.chat.completions.stream(**asked) as stream:
        done = [event for event in stream if isinstance(event, FunctionToolCallArgumentsDoneEvent)]
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.tool_calls is not None and whole.message.tool_calls is not None
    assert check(streamed.message.tool_calls) == check(whole.message.tool_calls)
    assert [event.arguments for event in done] == [whole.message.tool_calls[0].function.arguments]
    assert streamed.finish_reason == finish


def test_several_calls_are_bounded(sdk: openai.OpenAI) -> None:
    for seed in range(2):
        (choice,) = sdk.chat.completions.create(
            **ASKED
            | {"tool_choice": "required", "temperature": 1, "seed": seed, "max_completion_tokens": 500}
        ).choices
        assert choice.finish_reason == "tool_calls"
        assert 1 <= len(check(choice.message.tool_calls)) <= 8


def test_the_answer_of_a_tool_goes_back(sdk: openai.OpenAI) -> None:
    (choice,) = sdk.chat.completions.create(**ASKED, tool_choice=NAMED, temperature=0).choices
    assert choice.message.tool_calls is not None
    messages = [
        *ASKED["messages"],
        choice.message,
        {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "20 degrees and sunny"},
    ]
    (answer,) = sdk.chat.completions.create(
        **ASKED | {"messages": messages, "max_completion_tokens": 8}, tool_choice="none", temperature=0
    ).choices
    assert answer.message.content and answer.message.tool_calls is None


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "object", "properties": {"x": {"not": {}}}}, "not: answers cannot be held to"),
        ({"type": "object", "properties": {"x": {"$ref": "#/$defs/none"}}}, "tools: "),
    ],
)
def test_a_schema_that_nothing_can_be_held_to_is_refused_where_a_call_is_forced(
    sdk: openai.OpenAI, schema: Any, says: str
) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    asked = ASKED | {"tools": tools, "max_completion_tokens": 2}
    with pytest.raises(openai.BadRequestError, match=says.replace("(", r"\(")):
        sdk.chat.completions.create(**asked, tool_choice="required")
    assert sdk.chat.completions.create(**asked).choices
