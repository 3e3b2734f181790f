"""/tokenize and /detokenize: the ids that a completion of the same body has, and the text of any ids."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from common.request import unpack_ids
from coordinator.tokenizer import Tokenizer
from tests.coordinator.scripted_gateway import Served

TEXT = "naïve café 😀 <|im_start|> 你好"
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
TOOL = {"type": "function", "function": {"name": "get_weather"}}


def test_a_text(client: httpx.Client, tokenizer: Tokenizer) -> None:
    body = client.post("/tokenize", json={"model": "smol", "prompt": TEXT}).json()
    ids = tokenizer.encode_now(TEXT)
    assert body == {"count": len(ids), "max_model_len": 8192, "tokens": ids, "token_strs": None}
    spelled = client.post("/tokenize", json={"prompt": " hi", "return_token_strs": True}).json()
    assert spelled["token_strs"] == ["Ġhi"]
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": TEXT}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL]},
        {"add_generation_prompt": False},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "Well, "}], "continue_final_message": True},
        {"chat_template_kwargs": {"unused": 1}},
    ],
)
def test_a_chat_is_what_a_completion_has(
    served: Served, client: httpx.Client, fields: dict[str, Any]
) -> None:
    served.gateway.answers(2, finish="stop")
    body = {"model": "smol", "messages": MESSAGES} | fields
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    ids = unpack_ids(served.gateway.requests[-1].prompt_ids)
    assert client.post("/tokenize", json=body).json()["tokens"] == ids
    text = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text.startswith("<|im_start|>system\nBe brief.")
    begins = text.endswith("<|im_start|>assistant\n")
    assert begins == ("add_generation_prompt" not in fields and "continue_final_message" not in fields)
    assert text.endswith("assistant\nWell, ") == ("continue_final_message" in fields)
    assert ("get_weather" in text) == ("tools" in fields)


def test_ids_that_are_no_text_are_replaced(client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_now("😀")
    assert len(ids) > 1
    assert client.post("/detokenize", json={"tokens": ids[:1]}).json() == {"prompt": "\ufffd"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_a_text_longer_than_the_context_has_its_count(client: httpx.Client) -> None:
    body = client.post("/tokenize", json={"prompt": "word " * 20_000}).json()
    assert body["count"] == len(body["tokens"]) > body["max_model_len"]


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, None),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, None),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": [TOOL]}, 400, "tools"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "other": 1}, 422, "other"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, 422, "chat_template"),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            400,
            "continue_final_message",
        ),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "1"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, 400, "tokens"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1.0]}, 400, "tokens[0]"),
    ],
)
def test_what_is_refused(
    client: httpx.Client, route: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    reply = client.post(route, content=json.dumps(body))
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


def test_a_body_has_its_limits(client: httpx.Client) -> None:
    reply = client.post("/tokenize", json={"prompt": "x" * (2 << 20)})
    assert reply.status_code == 413
    assert client.post("/detokenize", content=b"[" * 3000).status_code == 400
