"""The client that users have, against the real HTTP front."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from common.errors import NotAdmitted, RequestFailed
from common.request import Request
from coordinator.tokenizer import Tokenizer
from tests.coordinator.scripted_gateway import Script, Served

ANSWER = "Paris 😀 is the capital."


@pytest.fixture
def sdk(served: Served, tokenizer: Tokenizer) -> Iterator[openai.OpenAI]:
    served.gateway.answers(*tokenizer.encode_now(ANSWER), 2, finish="stop", cached_tokens=16)
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(sdk: openai.OpenAI) -> None:
    completion = sdk.chat.completions.create(
        model="smol",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "capital?"}],
        logprobs=True,
        top_logprobs=2,
        temperature=0,
        max_completion_tokens=20,
        seed=1,
    )
    choice = completion.choices[0]
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content) == ANSWER.encode()
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 16


def test_streamed_chat(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": "capital?"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


def test_the_stream_helper_gathers_the_same(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(
        model="smol", messages=[{"role": "user", "content": "capital?"}]
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_text(sdk: openai.OpenAI) -> None:
    completion = sdk.completions.create(model="smol", prompt="The capital", logprobs=2, stop=[" is"])
    assert completion.choices[0].text == "Paris 😀"
    assert completion.choices[0].logprobs is not None
    parts = sdk.completions.create(model="smol", prompt="The capital", stream=True)
    assert "".join(part.choices[0].text for part in parts) == ANSWER


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["smol", "alias"]
    assert sdk.models.retrieve("smol").id == "smol"


def test_errors_have_their_types(sdk: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.completions.create(model="gpt", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.completions.create(model="smol", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.UnprocessableEntityError) as unsupported:
        sdk.completions.create(model="smol", prompt="x", best_of=2)
    assert unsupported.value.param == "best_of"
    served.gateway.answers(260, refuse=NotAdmitted("full", retry_after_s=1))
    with pytest.raises(openai.RateLimitError):
        sdk.completions.create(model="smol", prompt="x")
    served.gateway.answers(260, 260, error=RequestFailed("decode failed"), error_after=1)
    with pytest.raises(openai.APIError, match="decode failed"):
        list(sdk.completions.create(model="smol", prompt="x", stream=True))


def test_a_refused_request_is_tried_again(sdk: openai.OpenAI, served: Served) -> None:
    refusals = iter([NotAdmitted("full", retry_after_s=0.1)])
    served.gateway.script = lambda _: Script([260], refuse=next(refusals, None))
    completion = sdk.with_options(max_retries=1).completions.create(model="smol", prompt="x")
    assert completion.choices[0].text == " the"


def test_many_at_once_do_not_mix(served: Served, tokenizer: Tokenizer) -> None:
    def script(request: Request) -> Script:
        number = request.sampling.max_tokens
        return Script(tokenizer.encode_now(f"answer {number} " * 5), gap_s=0.002, group=number % 3 + 1)

    served.gateway.script = script

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model="smol", messages=[{"role": "user", "content": "x"}], max_tokens=number, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, number) for number in range(1, 41)))

    assert asyncio.run(all_of_them()) == [f"answer {number} " * 5 for number in range(1, 41)]
