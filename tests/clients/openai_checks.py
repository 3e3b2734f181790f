"""The openai SDK as people use it: `python -m tests.clients.openai_checks URL MODEL`, in a venv that has it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.clients.checks import run

URL, MODEL = sys.argv[1:3]
CLIENT = OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=60, max_retries=2)
QUESTION: list[Any] = [{"role": "user", "content": "Name a colour."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Colour(BaseModel):
    name: str = Field(max_length=20)
    warm: bool


def models() -> None:
    assert [model.id for model in CLIENT.models.list()] == [MODEL]
    assert CLIENT.models.retrieve(MODEL).id == MODEL


def chat_whole_and_streamed() -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    whole = CLIENT.chat.completions.create(**asked)
    chunks = list(
        CLIENT.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and text
    # What is cached differs: the second of two equal requests finds the first one's.
    counted = [
        {**usage.model_dump(), "prompt_tokens_details": None}
        for usage in (whole.usage, chunks[-1].usage)
        if usage
    ]
    assert len(counted) == 2 and counted[0] == counted[1]


def choices_and_logprobs() -> None:
    answer = CLIENT.chat.completions.create(
        model=MODEL, messages=QUESTION, n=3, seed=7, max_tokens=8, logprobs=True, top_logprobs=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    assert len({choice.message.content for choice in answer.choices}) > 1


def text_of_several_prompts() -> None:
    answer = CLIENT.completions.create(
        model=MODEL, prompt=["The sky is", "Water is"], max_tokens=4, echo=True, logprobs=1, temperature=0
    )
    assert [
        choice.text.startswith(begin)
        for choice, begin in zip(answer.choices, ("The sky", "Water"), strict=True)
    ]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text


def a_tool_is_called() -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "temperature": 0,
        "max_tokens": 100,
    }
    calls = CLIENT.chat.completions.create(**asked).choices[0].message.tool_calls
    assert calls is not None and calls[0].type == "function" and calls[0].function.name == "weather"
    assert set(json.loads(calls[0].function.arguments)) == {"city"}
    with CLIENT.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed is not None and streamed[0].function.arguments == calls[0].function.arguments


def an_answer_is_parsed() -> None:
    answer = CLIENT.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Colour, max_tokens=100, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Colour)


def errors_are_of_their_kind() -> None:
    for change, kind, param in (
        ({"temperature": 1000}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"frobnicate": 1}}, openai.UnprocessableEntityError, "frobnicate"),
        ({"model": "nobody"}, openai.NotFoundError, "model"),
    ):
        asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 1, **change}
        try:
            CLIENT.chat.completions.create(**asked)
        except kind as error:
            assert error.param == param, error
        else:
            raise AssertionError(f"{change} was accepted")


def many_at_once() -> None:
    async def ask(client: AsyncOpenAI, number: int) -> str | None:
        answer = await client.completions.create(
            model=MODEL, prompt=f"{number} and {number} is", max_tokens=6, temperature=0
        )
        return answer.choices[0].text

    async def gather() -> list[str | None]:
        async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", timeout=60) as client:
            return await asyncio.gather(*(ask(client, number) for number in [*range(8), *range(8)]))

    answers = asyncio.run(gather())
    assert answers[:8] == answers[8:] and all(answers)


if __name__ == "__main__":
    sys.exit(
        run(
            [
                models,
                chat_whole_and_streamed,
                choices_and_logprobs,
                text_of_several_prompts,
                a_tool_is_called,
                an_answer_is_parsed,
                errors_are_of_their_kind,
                many_at_once,
            ]
        )
    )
