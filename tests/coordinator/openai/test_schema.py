from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import BadRequest, UnsupportedField
from coordinator.openai import neutral_fields
from coordinator.openai.messages import MAX_PARTS
from coordinator.openai.schema import (
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_PROMPT_IDS,
    MAX_STOP_BYTES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    read_chat,
    read_text,
)

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}
INF = float("inf")
MANY = [-0.0, 1e-9, 1e-30, 2**31, 2**63, 2**64, -(2**63) - 1, 1e309, "1", True, [], {}, -1, 0, 1.5]
"""Values that each numeric field is tried with; `TAKEN` says which of them it takes."""

TAKEN: dict[str, list[Any]] = {
    "temperature": [-0.0, 1e-30, 1e-9, 0, 1.5],
    "top_p": [1e-30, 1e-9],
    "top_k": [2**31, 2**63, 2**64, -1, 0],
    "min_p": [-0.0, 1e-30, 1e-9, 0],
    "seed": [2**31, -1, 0],
    "max_tokens": [2**31, 2**63, 2**64],
    "min_tokens": [2**31, 2**63, 2**64, 0],
    "presence_penalty": [-0.0, 1e-30, 1e-9, -1, 0, 1.5],
    "frequency_penalty": [-0.0, 1e-30, 1e-9, -1, 0, 1.5],
    "repetition_penalty": [1e-9, 1.5],
    "priority": [-1, 0],
}


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("field", TAKEN)
def test_numbers(field: str) -> None:
    for value in MANY:
        body = TEXT | {field: value}
        if any(_same(value, taken) for taken in TAKEN[field]):
            assert getattr(read_text(body), field) == value
            read_chat(CHAT | {field: value})
        else:
            for read, base in ((read_text, TEXT), (read_chat, CHAT)):
                with pytest.raises(BadRequest) as refused:
                    read(base | {field: value})
                assert (refused.value.status, refused.value.param) == (400, field), (field, value)
                assert refused.value.message.startswith(f"{field}: ")


BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]}, "messages[1]"),
    ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]},
        "messages[0].content",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
]
BAD_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"model": "\ud83d"}, "model"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop": [None]}, "stop"),
    ({"stop": "\udcf0"}, "stop"),
    ({"stop": ["a"] * (MAX_STOPS + 1)}, "stop"),
    ({"stop": "a" * (MAX_STOP_BYTES + 1)}, "stop"),
    ({"stop": "é" * (MAX_STOP_BYTES // 2 + 1)}, "stop"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"1": 1e9}}, "logit_bias.1"),
    ({"logit_bias": {"1": "1"}}, "logit_bias.1"),
    ({"logit_bias": {"1": INF}}, "logit_bias.1"),
    ({"logit_bias": {"1": None}}, "logit_bias.1"),
    ({"logit_bias": {str(id): 1 for id in range(MAX_LOGIT_BIASES + 1)}}, "logit_bias"),
    *(({"n": n}, "n") for n in (0, -1, 129, 2**63, "2", 1.0, True, [2])),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "true"}, "stream"),
    ({"stream": True, "stream_options": True}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"user": "\ud83d"}, "user"),
    ({"service_tier": ""}, "service_tier"),
    ({"user": "u" * 513}, "user"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"service_tier": 5}, "service_tier"),
]
BAD_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1] * (MAX_PROMPT_IDS + 1)}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1, True]]}, "prompt"),
    ({"prompt": "\udcf0"}, "prompt"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
]


@pytest.mark.parametrize(("change", "param"), BAD_CHAT + BAD_BOTH)
def test_bad_values_of_chat(change: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_chat(CHAT | change)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert len(refused.value.message) < 400
    json.dumps(refused.value.message).encode()


@pytest.mark.parametrize(("change", "param"), BAD_TEXT + BAD_BOTH)
def test_bad_values_of_text(change: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_text(TEXT | change)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"frobnicate": None}, "frobnicate"),
        ({"best_of": 2}, "best_of"),
        ({"n": 3, "best_of": 4}, "best_of"),
        ({"store": 0}, "store"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"metadata": {"a": "b"}}, "metadata"),
        ({"guided_decoding_backend": "auto"}, "guided_decoding_backend"),
        ({"prompt": "x"}, "prompt"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"stream": True, "stream_options": {"x": True}}, "stream_options.x"),
        ({"messages": [{"role": "user", "content": "x", "frob": 1}]}, "messages[0].frob"),
        (
            {"messages": [{"role": "assistant", "content": "x", "function_call": {}}]},
            "messages[0].function_call",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
            "messages[0].content[0].y",
        ),
    ],
)
def test_what_we_do_not_do_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedField) as refused:
        read_chat(CHAT | change)
    assert (refused.value.status, refused.value.param) == (422, param)
    assert refused.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("prompts", "why"),
    [
        (["a", [1]], "entry 1 is not of the first one's kind"),
        ([[1], "a"], "entry 1 is not of the first one's kind"),
        ([[1], 2], "entry 1 is not of the first one's kind"),
        ([[1], []], "entry 1 is empty"),
        ([[1], [2, "a"]], "entry 1 must hold token ids only"),
        (["a"] * 129, "at most 128 prompts"),
        ([[1] * MAX_PROMPT_IDS, [2]], f"at most {MAX_PROMPT_IDS} token ids in all"),
        (["a", "\udcf0"], "half of a surrogate pair"),
    ],
)
def test_several_prompts_are_of_one_kind_and_none_is_empty(prompts: list[Any], why: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_text(TEXT | {"prompt": prompts})
    assert (refused.value.status, refused.value.param) == (400, "prompt")
    assert why in refused.value.message


def test_best_of_that_is_n_asks_for_nothing() -> None:
    assert read_chat(CHAT | {"n": 3, "best_of": 3}).n == 3
    assert read_text(TEXT | {"best_of": 1}).n == 1


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_neutral_values_and_null_ask_for_nothing(kind: str) -> None:
    table = neutral_fields.CHAT if kind == "chat" else neutral_fields.TEXT
    base = CHAT if kind == "chat" else TEXT
    read: Any = read_chat if kind == "chat" else read_text
    plain = read(base)
    assert read(base | dict.fromkeys(table)) == plain
    for name, values in table.items():
        for value in values:
            assert read(base | {name: value}) == plain, name
        with pytest.raises(UnsupportedField) as refused:
            read(base | {name: {"strange": 1}})
        assert refused.value.param == name


def test_null_means_absent() -> None:
    for base, read in ((CHAT, read_chat), (TEXT, read_text)):
        fields = read(base)
        optional = [name for name in type(fields).model_fields if name not in base]
        assert read(base | dict.fromkeys(optional)) == fields
        assert read(base | {"user": "", "cache_salt": ""}) == fields


def test_no_field_is_both_taken_and_neutral() -> None:
    for kind in (read_chat(CHAT), read_text(TEXT)):
        assert not set(type(kind).model_fields) & set(type(kind).NEUTRAL)


def test_shapes_that_are_the_same_thing() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_chat(CHAT | {"messages": [{"role": "user", "content": parts}]}).messages[0].content == "a\nb"
    assert read_text(TEXT | {"prompt": ["a"]}) == read_text(TEXT | {"prompt": "a"})
    assert read_text(TEXT | {"prompt": [[7, 8]]}) == read_text(TEXT | {"prompt": [7, 8]})
    assert read_text(TEXT | {"prompt": [[7, 8], [9]]}).prompt == [[7, 8], [9]]
    assert read_text(TEXT | {"stop": "a"}).stop == ["a"]
    assert read_text(TEXT | {"stop": []}).stop == []
    assert read_text(TEXT | {"logprobs": 0}).num_logprobs == 0
    assert read_chat(CHAT | {"logprobs": True}).num_logprobs == 0
    assert read_chat(CHAT | {"logprobs": False}).num_logprobs is None
    assert read_chat(CHAT | {"top_logprobs": 0}).num_logprobs is None
    developer = read_chat(CHAT | {"messages": [{"role": "developer", "content": "x"}]}).messages[0]
    assert developer.for_template() == {"role": "system", "content": "x"}


def test_an_error_does_not_echo_the_input() -> None:
    messages = [{"role": 5, "content": "secret " * 150}] * 10_000
    with pytest.raises(BadRequest) as refused:
        read_chat(CHAT | {"messages": messages})
    assert refused.value.param == "messages[0].role"
    assert "secret" not in refused.value.message
    for name in ("x" * 10_000, "\ud83d", "a\nb", "{why}"):
        with pytest.raises(UnsupportedField) as unknown:
            read_chat(CHAT | {name: 1})
        assert len(unknown.value.message) < 400
        unknown.value.message.encode()


def test_parts_of_a_message_are_bounded() -> None:
    part = {"type": "text", "text": "x"}
    assert read_chat(CHAT | {"messages": [{"role": "user", "content": [part] * MAX_PARTS}]})
    with pytest.raises(BadRequest, match=f"at most {MAX_PARTS} parts"):
        read_chat(CHAT | {"messages": [{"role": "user", "content": [part] * (MAX_PARTS + 1)}]})
