from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from common.config import Tier
from common.errors import BadRequest, ModelNotFound, NoWorker, UnsupportedField
from common.front_messages import Submit
from common.messages import Sender
from common.request import FrontId, Incarnation, unpack_ids
from common.wire import decode, encode
from coordinator.answer_size import MAX_WHOLE_LOGPROBS, MAX_WHOLE_TOKENS
from coordinator.errors_http import error_object
from coordinator.openai.schema import ChatFields, TextFields, read_chat, read_text
from coordinator.request_builder import Job, RequestBuilder
from coordinator.tiers import Tiers
from coordinator.tokenizer import Tokenizer
from tests.coordinator.scripted_gateway import ScriptedGateway

VOCAB = 49152
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi there"}
TIERS = Tiers({"default": Tier(), "fast": Tier(priority=-2, weight=3, ttft_ms=250, max_priority_offset=3)})


@pytest.fixture
def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
def builder(tokenizer: Tokenizer, gateway: ScriptedGateway) -> RequestBuilder:
    return RequestBuilder(gateway, tokenizer, ("m", "n"), TIERS, FrontId("f"))


def text(builder: RequestBuilder, tenant: str | None = None, **change: Any) -> Job:
    return asyncio.run(builder.text(read_text(TEXT | change), tenant))


def chat(builder: RequestBuilder, **change: Any) -> Job:
    return asyncio.run(builder.chat(read_chat(CHAT | change), None))


def refused(call: Any, builder: RequestBuilder, **change: Any) -> BadRequest:
    with pytest.raises(BadRequest) as error:
        call(builder, **change)
    return error.value


def test_every_setting_arrives(builder: RequestBuilder) -> None:
    job = text(
        builder,
        model="n",
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=-5,
        max_tokens=9,
        min_tokens=3,
        stop=["a", "b"],
        stop_token_ids=[9, 4],
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"7": -100, "0": 5},
        logprobs=4,
        stream=True,
        stream_options={"include_usage": True},
        user="u",
        priority=-3,
        service_tier="fast",
        cache_salt="s",
    )
    sampling = job.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 7, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (-5, 9, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        1,
        -1,
        1.5,
    )
    assert sampling.logit_bias == ((0, 5.0), (7, -100.0))
    assert (sampling.end_token_ids, sampling.logprobs) == ((2, 4, 9), 4)
    request = job.request
    assert (request.tier, request.priority, request.cache_salt, request.tenant) == ("fast", -5, "s", "u")
    assert request.front == "f"
    assert request.request_id.startswith("cmpl")
    assert (job.model, job.stops, job.stream, job.include_usage) == ("n", ("a", "b"), True, True)


def test_what_is_left_out(builder: RequestBuilder) -> None:
    job = text(builder)
    assert job.request.sampling.end_token_ids == (2,)
    assert job.request.sampling.max_tokens == 16
    assert (job.request.tier, job.request.tenant, job.stream) == ("default", "", False)
    assert text(builder).request.sampling.seed != job.request.sampling.seed
    assert text(builder, ignore_eos=True).request.sampling.end_token_ids == ()
    assert text(builder, ignore_eos=True, stop_token_ids=[5]).request.sampling.end_token_ids == (5,)
    assert text(builder, seed=0).request.sampling.seed == 0
    assert text(builder, top_k=-1).request.sampling.top_k == 0
    assert text(builder, top_k=2**31).request.sampling.top_k == VOCAB
    assert chat(builder, logprobs=True).request.sampling.logprobs == 0
    assert chat(builder).request.request_id.startswith("chatcmpl")


def test_the_tenant_is_the_key_where_there_is_one(builder: RequestBuilder) -> None:
    assert text(builder, tenant="key-1", user="u").request.tenant == "key-1"
    assert text(builder, tenant=None, user="u").request.tenant == "u"


@pytest.mark.parametrize("id", [-1, VOCAB, 2**31, 2**63])
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids"])
def test_token_ids_outside_the_vocabulary(builder: RequestBuilder, field: str, id: int) -> None:
    bad: dict[str, Any] = {field: [5, id]}
    good: dict[str, Any] = {field: [5, VOCAB - 1]}
    error = refused(text, builder, **bad)
    assert (error.status, error.param) == (400, field)
    assert f"{field}[1]" in error.message
    assert "49151" in error.message
    assert text(builder, **good)


@pytest.mark.parametrize(
    "key", ["-1", str(VOCAB), "999999", "AI", "1.5", "", "٣", "9" * 5000, "\ud83d", "1_0", " 1"]
)
def test_bias_for_what_is_no_token(builder: RequestBuilder, key: str) -> None:
    error = refused(text, builder, logit_bias={key: 1})
    assert (error.status, error.param) == (400, "logit_bias")
    assert len(error.message.encode()) < 400


def test_ids_are_the_prompt(builder: RequestBuilder) -> None:
    assert unpack_ids(text(builder, prompt=[5, 0, VOCAB - 1]).request.prompt_ids) == [5, 0, VOCAB - 1]
    assert unpack_ids(text(builder, prompt=[[5]]).request.prompt_ids) == [5]


@pytest.mark.parametrize("prompt", ["", [""]])
def test_an_empty_prompt(builder: RequestBuilder, prompt: Any) -> None:
    assert refused(text, builder, prompt=prompt).param == "prompt"


def test_a_seed_given_at_start_makes_the_seeds_of_requests_without_one(
    gateway: ScriptedGateway, tokenizer: Tokenizer
) -> None:
    def first_seeds(seed: int) -> list[int]:
        made = RequestBuilder(gateway, tokenizer, ("m",), Tiers(), FrontId("f"), seed)
        return [text(made, model="m").request.sampling.seed for _ in range(3)]

    assert first_seeds(7) == first_seeds(7)
    assert first_seeds(7) != first_seeds(8)


def test_models_and_tiers(builder: RequestBuilder) -> None:
    error = refused(text, builder, model="gpt-4")
    assert isinstance(error, ModelNotFound)
    assert "gpt-4" in error.message
    assert "m, n" in error.message
    unknown = refused(text, builder, service_tier="flex")
    assert isinstance(unknown, UnsupportedField)
    assert unknown.param == "service_tier"
    assert unknown.message.endswith("one of: auto, default, fast.")
    for name in ("auto", "default"):
        assert text(builder, service_tier=name).request.tier == "default"


def test_room_in_the_context(builder: RequestBuilder, gateway: ScriptedGateway) -> None:
    gateway.context = 100
    for length, max_tokens, taken in [
        (99, None, 1),
        (99, 1, 1),
        (90, None, 10),
        (50, None, 16),
        (50, 50, 50),
    ]:
        assert text(builder, prompt=[5] * length, max_tokens=max_tokens).request.sampling.max_tokens == taken
    for length in (100, 101, 300):
        error = refused(text, builder, prompt=[5] * length)
        assert (error.status, error.param, error.code) == (400, "prompt", "context_length_exceeded")
        assert str(length) in error.message
        assert "100 tokens" in error.message
    for max_tokens in (51, 10**18, 10**4000):
        error = refused(text, builder, prompt=[5] * 50, max_tokens=max_tokens)
        assert (error.status, error.param, error.code) == (400, "max_tokens", "context_length_exceeded")
        assert "at most 50" in error.message
        assert len(error.message) < 400


def test_room_in_a_chat(builder: RequestBuilder, gateway: ScriptedGateway) -> None:
    used = chat(builder).request.prompt_tokens
    assert chat(builder).request.sampling.max_tokens == 8192 - used
    assert chat(builder, max_completion_tokens=5).request.sampling.max_tokens == 5
    assert chat(builder, max_tokens=5, max_completion_tokens=5).request.sampling.max_tokens == 5
    assert refused(chat, builder, max_completion_tokens=8192).param == "max_completion_tokens"
    assert refused(chat, builder, max_tokens=8192).param == "max_tokens"
    gateway.context = used
    assert refused(chat, builder).param == "messages"


def test_an_answer_sent_whole_is_bounded_over_its_choices(
    builder: RequestBuilder, gateway: ScriptedGateway
) -> None:
    """128 choices of a long context with twenty alternatives to each token would be gigabytes in one request."""
    scored = {"logprobs": True, "top_logprobs": 20, "n": 2}
    most = MAX_WHOLE_LOGPROBS // (2 * 21)
    assert chat(builder, **scored).request.sampling.max_tokens == most, "what fits, where it is left out"
    assert chat(builder, **scored, max_tokens=most).request.sampling.max_tokens == most
    fault = refused(chat, builder, **scored, max_tokens=most + 1)
    assert (fault.param, fault.code) == ("max_tokens", "answer_too_large") and str(most) in fault.message
    assert refused(chat, builder, **scored, max_completion_tokens=most + 1).param == "max_completion_tokens"
    assert chat(builder, **scored, max_tokens=most + 1, stream=True).stream
    many: dict[str, Any] = {"prompt": ["a"] * 64, "n": 2, "logprobs": 20}
    assert (
        refused(text, builder, **many, max_tokens=MAX_WHOLE_LOGPROBS // (128 * 21) + 1).param == "max_tokens"
    )
    assert len(text(builder, **many).requests) == 128
    gateway.context = MAX_WHOLE_TOKENS
    assert refused(text, builder, n=128, max_tokens=MAX_WHOLE_TOKENS // 128 + 1).code == "answer_too_large"
    assert len(text(builder, n=128, max_tokens=MAX_WHOLE_TOKENS // 128).requests) == 128


def test_min_tokens_above_max_tokens(builder: RequestBuilder) -> None:
    assert refused(text, builder, min_tokens=17).param == "min_tokens"
    assert text(builder, min_tokens=16).request.sampling.min_tokens == 16


def test_without_workers_a_bad_request_is_still_told_what_is_wrong(
    builder: RequestBuilder, gateway: ScriptedGateway
) -> None:
    gateway.context, gateway.unhealthy = None, "no decode worker"
    assert refused(text, builder, temperature=-1).status == 400
    with pytest.raises(NoWorker, match="no decode worker"):
        text(builder)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.sampled_from(
        [-0.0, 1e-9, 2**63, 2**64, "1", "\ud83d", "", "auto", "text", "user", "role", "content"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "5", "\ud83d"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
FIELDS = sorted(
    {*ChatFields.model_fields, *TextFields.model_fields, *ChatFields.NEUTRAL, *TextFields.NEUTRAL}
)


@settings(max_examples=200, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), JSON, max_size=3))
def test_any_value_of_any_field_is_taken_or_refused(tokenizer: Tokenizer, changes: dict[str, Any]) -> None:
    """Never another exception, always a field's name, and what is taken can travel."""
    builder = RequestBuilder(ScriptedGateway(), tokenizer, ("m",), Tiers(), FrontId("f"))
    for base, build in ((CHAT, chat), (TEXT, text)):
        try:
            job = build(builder, **base | changes)
        except BadRequest as error:
            assert error.status in (400, 404, 422)
            assert error.param or error.message.startswith("The body"), error.message
            assert len(error_object(error)) < 4096
        else:
            sender = Sender("coordinator", Incarnation(1))
            assert decode(encode(Submit(job.requests), sender))[1] == Submit(job.requests)
