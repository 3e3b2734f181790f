"""The client that users have, sync and async, against real services: what it shows, and how it fails.

What it makes of words that must be forced is in `tests/coordinator/test_openai_client.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.service import MODEL, Service, serving

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
KEY = "only-this-one"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Service]:
    """One answer at a time, one in the queue, and a key; prefill and decode in one process."""
    flags = ["--prefill", "0", "--max-num-seqs", "1", "--max-queue", "1", "--kv-cache-memory", "64MiB"]
    with serving(tmp_path_factory.mktemp("narrow") / "log", *flags, "--api-key", KEY) as service:
        yield service


@pytest.fixture
def sdk(undisturbed: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=undisturbed.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def test_chat_whole_and_streamed(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "temperature": 0,
        "max_completion_tokens": 12,
    }
    whole = sdk.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert "Paris" in (choice.message.content or "")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in choice.logprobs.content)
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    chunks = list(sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == choice.message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == choice.finish_reason
    with sdk.chat.completions.stream(**asked) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == said


def test_text_whole_and_streamed(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 4}
    for fields in (
        {"temperature": 0},
        {"temperature": 1, "seed": 5},
        {"seed": 5, "stop": [" "], "logprobs": 1},
    ):
        whole = sdk.completions.create(**asked, **fields)
        parts = list(sdk.completions.create(**asked, **fields, stream=True))
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
        assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert whole.usage is not None and 1 <= whole.usage.completion_tokens <= 4


def test_several_choices(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "seed": 1, "max_tokens": 5, "n": 3}
    whole = sdk.chat.completions.create(**asked)
    said = [choice.message.content or "" for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2] and len(set(said)) > 1
    texts = [""] * 3
    for chunk in sdk.chat.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == said


class Capital(BaseModel):
    """Bounded, so that an answer ends."""

    city: Literal["Paris", "London", "Rome"]
    in_europe: bool
    rivers: Annotated[int, Field(ge=0, le=9)]


def test_an_answer_that_is_an_object(sdk: openai.OpenAI) -> None:
    """The SDK makes the schema and reads the answer, whole and streamed."""
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "seed": 1, "max_tokens": 80}
    parsed = sdk.chat.completions.parse(**asked, response_format=Capital).choices[0].message
    assert isinstance(parsed.parsed, Capital)
    with sdk.chat.completions.stream(**asked, response_format=Capital) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.parsed == parsed.parsed
    with pytest.raises(openai.BadRequestError) as refused:
        schema: Any = {"type": "array", "uniqueItems": True}
        sdk.chat.completions.create(
            **asked,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
    assert "uniqueItems" in refused.value.message


class Weather(BaseModel):
    """Of a city, for some days."""

    city: Literal["Paris", "Rome"]
    days: Annotated[int, Field(ge=1, le=9)]


def test_a_call_of_a_tool(sdk: openai.OpenAI) -> None:
    """It must come, whole and streamed, with arguments that the SDK makes an object of."""
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "seed": 1, "max_tokens": 100}
    asked |= {"tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required"}
    asked["parallel_tool_calls"] = False
    whole = sdk.chat.completions.parse(**asked).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert call.function.name == "Weather" and isinstance(call.function.parsed_arguments, Weather)
    with sdk.chat.completions.stream(**asked) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert len(deltas) > 3 and streamed is not None
    assert streamed[0].function.parsed_arguments == call.function.parsed_arguments
    messages: Any = [*QUESTION, {"role": "assistant", "tool_calls": [call.model_dump(exclude_none=True)]}]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "It rains."})
    for part in messages[1]["tool_calls"]:
        part["function"].pop("parsed_arguments", None)
    answer = sdk.chat.completions.create(
        **{**asked, "messages": messages, "tool_choice": "none", "max_tokens": 4}
    )
    assert answer.choices[0].message.tool_calls is None


def test_models_and_the_request_id(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).id == MODEL
    named = {"x-request-id": "mine-1"}
    raw = sdk.completions.with_raw_response.create(model=MODEL, prompt="a", max_tokens=1, extra_headers=named)
    assert raw.headers["x-request-id"] == "mine-1" and raw.request_id == "mine-1"
    assert raw.parse().choices[0].finish_reason == "length"
    with sdk.completions.with_streaming_response.create(
        model=MODEL, prompt="a", max_tokens=1, stream=True, extra_headers=named
    ) as streamed:
        assert streamed.headers["x-request-id"] == "mine-1"
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.models.retrieve("none", extra_headers=named)
    assert missing.value.request_id == "mine-1"


def test_errors_have_their_types(sdk: openai.OpenAI, narrow: Service) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.completions.create(model="gpt", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.completions.create(model=MODEL, prompt="x", temperature=-1, stream=True)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.UnprocessableEntityError) as unknown:
        sdk.completions.create(model=MODEL, prompt="x", extra_body={"temprature": 1})
    assert unknown.value.param == "temprature"
    with pytest.raises(openai.BadRequestError) as long:
        sdk.completions.create(model=MODEL, prompt="x", max_tokens=100_000)
    assert long.value.code == "context_length_exceeded"
    for key in ("wrong", KEY[:-1], KEY + "x"):
        with (
            openai.OpenAI(base_url=narrow.url + "/v1", api_key=key, max_retries=0) as client,
            pytest.raises(openai.AuthenticationError) as locked,
        ):
            client.models.list()
        assert key not in str(locked.value)
    with (
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()


def test_who_gives_up_leaves_nothing_behind(sdk: openai.OpenAI, undisturbed: Service) -> None:
    """By its own time limit, by closing a stream, and by cancelling a task: the blocks are free again."""
    endless: dict[str, Any] = {"model": MODEL, "prompt": "One,", "max_tokens": 4000}
    endless["extra_body"] = {"ignore_eos": True}
    with pytest.raises(openai.APITimeoutError):
        sdk.with_options(timeout=0.5).completions.create(**endless)
    with sdk.completions.create(**endless, stream=True) as stream:
        assert next(iter(stream)).choices[0].text
    undisturbed.until_idle(5)

    async def cancelled() -> None:
        async with openai.AsyncOpenAI(base_url=undisturbed.url + "/v1", api_key="x", max_retries=0) as client:
            heard = asyncio.Event()

            async def read() -> None:
                async for _ in await client.completions.create(**endless, stream=True):
                    heard.set()

            whole = asyncio.create_task(client.completions.create(**endless))
            reading = asyncio.create_task(read())
            await asyncio.wait_for(heard.wait(), 30)
            for task in (whole, reading):
                task.cancel()
            await asyncio.gather(whole, reading, return_exceptions=True)
            assert whole.cancelled() and reading.cancelled()

    asyncio.run(cancelled())
    undisturbed.until_idle(5)


def test_many_at_once_say_what_each_says_alone(sdk: openai.OpenAI, undisturbed: Service) -> None:
    def fields(seed: int) -> dict[str, Any]:
        return {"model": MODEL, "messages": QUESTION, "seed": seed, "max_tokens": 6}

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=undisturbed.url + "/v1", api_key="x") as client:

            async def whole(seed: int) -> str:
                answer = await client.chat.completions.create(**fields(seed))
                return answer.choices[0].message.content or ""

            async def streamed(seed: int) -> str:
                stream = await client.chat.completions.create(**fields(seed), stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(ask(seed) for ask in (whole, streamed) for seed in range(6)))

    texts = asyncio.run(ask_all())
    assert texts[:6] == texts[6:] and len(set(texts)) > 3
    alone = sdk.chat.completions.create(**fields(0)).choices[0].message.content
    assert alone == texts[0]


def test_a_full_service_is_asked_again_when_it_said_so(narrow: Service) -> None:
    """One runs, one waits, the third is told 429 and when: the SDK waits that long, and is served."""
    with openai.OpenAI(base_url=narrow.url + "/v1", api_key=KEY, max_retries=0) as client:
        long: dict[str, Any] = {"model": MODEL, "prompt": "One,", "extra_body": {"ignore_eos": True}}
        with ThreadPoolExecutor(2) as threads:
            running = client.completions.create(**long, max_tokens=400, stream=True)
            next(iter(running))
            waiting = threads.submit(lambda: client.completions.create(**long, max_tokens=1))
            until_full(narrow)
            with pytest.raises(openai.RateLimitError) as full:
                client.completions.create(**long, max_tokens=1)
            retry_after_s = int(full.value.response.headers["retry-after"])
            assert 1 <= retry_after_s <= 60
            started = time.monotonic()
            patient = client.with_options(max_retries=3)
            again = threads.submit(lambda: patient.completions.create(**long, max_tokens=1))
            time.sleep(0.3)
            running.close()
            assert again.result().choices[0].text and waiting.result().choices[0].text
            assert time.monotonic() - started >= retry_after_s
    narrow.until_idle()


def until_full(service: Service) -> None:
    deadline = time.monotonic() + 10
    while not service.metric("num_requests_waiting"):
        assert time.monotonic() < deadline, "the second request does not wait"
        time.sleep(0.02)
