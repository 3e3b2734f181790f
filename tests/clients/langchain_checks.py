"""LangChain's ChatOpenAI as people use it: `python -m tests.clients.langchain_checks URL MODEL`, in its own venv."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.clients.checks import run

URL, MODEL = sys.argv[1:3]
QUESTION = "Name a colour."


def model(**settings: Any) -> Any:
    asked = {"temperature": 0, "max_tokens": 12, **settings}
    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", timeout=60, **asked)


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


class Colour(BaseModel):
    """A colour."""

    name: str = Field(max_length=20)
    warm: bool


def invoke() -> None:
    answer = model().invoke([("system", "Answer in one word."), ("human", QUESTION)])
    assert answer.content and answer.response_metadata["finish_reason"] in ("stop", "length")
    counted = answer.usage_metadata
    assert counted["total_tokens"] == counted["input_tokens"] + counted["output_tokens"]


def stream_is_invoke() -> None:
    chunks = list(model(stream_usage=True).stream(QUESTION))
    whole = model().invoke(QUESTION)
    assert "".join(chunk.content for chunk in chunks) == whole.content
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined = joined + chunk
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def batch() -> None:
    questions = [f"Name {number} colours." for number in range(1, 7)]
    answers = model().batch(questions)
    assert [answer.content for answer in answers] == [model().invoke(each).content for each in questions]


def asynchronous() -> None:
    async def both() -> tuple[str, str]:
        whole = await model().ainvoke(QUESTION)
        parts = [chunk.content async for chunk in model().astream(QUESTION)]
        return whole.content, "".join(parts)

    whole, streamed = asyncio.run(both())
    assert whole == streamed != ""


def logprobs() -> None:
    answer = model(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert all(len(entry["top_logprobs"]) == 2 for entry in answer.response_metadata["logprobs"]["content"])


def bound_tool_is_called() -> None:
    for choice in ("weather", "required"):
        bound = model(max_tokens=100).bind_tools([weather], tool_choice=choice)
        (call, *_) = bound.invoke("How is the weather in Paris?").tool_calls
        assert call["name"] == "weather" and isinstance(call["args"]["city"], str)


def streamed_tool_call_is_whole() -> None:
    bound = model(max_tokens=100).bind_tools([weather], tool_choice="weather")
    joined = None
    for chunk in bound.stream("How is the weather in Paris?"):
        joined = chunk if joined is None else joined + chunk
    assert joined is not None and joined.tool_calls[0]["name"] == "weather"


def tool_result_goes_back() -> None:
    bound = model(max_tokens=100).bind_tools([weather], tool_choice="weather")
    asked = bound.invoke("How is the weather in Paris?")
    told = weather.invoke(asked.tool_calls[0])
    answer = model().bind_tools([weather]).invoke([("human", "How is the weather in Paris?"), asked, told])
    assert answer.content or answer.tool_calls


def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        found = model(max_tokens=100).with_structured_output(Colour, method=method).invoke(QUESTION)
        assert isinstance(found, Colour), method
    loose = model(max_tokens=200).bind(response_format={"type": "json_object"})
    assert loose.invoke("Describe a colour as JSON.").content.lstrip().startswith("{")


if __name__ == "__main__":
    sys.exit(
        run(
            [
                invoke,
                stream_is_invoke,
                batch,
                asynchronous,
                logprobs,
                bound_tool_is_called,
                streamed_tool_call_is_whole,
                tool_result_goes_back,
                structured_output,
            ]
        )
    )
