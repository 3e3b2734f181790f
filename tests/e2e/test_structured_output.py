"""Answers that must have a form, from the 135M model through both pools: they have it, or the request is refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any, Literal

import openai
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from tests.e2e.schemas import HELD, REFUSED, closed
from tests.e2e.service import MODEL, Service, chat, completion, streamed, strict_json

AT_ONCE = 16
MAX_TOKENS = 160
FORMATS = Draft202012Validator.FORMAT_CHECKER
PERSON = closed(
    {"name": {"enum": ["Ada", "Zoë", "日本"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}}
)


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def exact(text: str) -> Any:
    """With numbers as they are written: in binary 1.11 is no multiple of 0.01."""
    return json.loads(text, parse_float=Decimal)


def test_a_hundred_schemas(undisturbed: Service) -> None:
    assert len(HELD) + len(REFUSED) == 100

    def ask(number: int) -> tuple[int, dict[str, Any]]:
        schema = HELD[number] if number < len(HELD) else REFUSED[number - len(HELD)][1]
        body = chat(
            "Tell me something about animals, as JSON.",
            temperature=1,
            seed=number,
            max_tokens=MAX_TOKENS,
            response_format=form(schema),
        )
        answer = undisturbed.post("/v1/chat/completions", body)
        return answer.status_code, answer.json()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, range(100)))
    for (keyword, _), (status, body) in zip(REFUSED, answers[len(HELD) :], strict=True):
        assert status == 400 and f"{keyword}: " in body["error"]["message"], body
        assert body["error"]["param"] == "response_format.json_schema.schema"
    finished = Counter[str]()
    for schema, (status, body) in zip(HELD, answers, strict=False):
        assert status == 200, (body, schema)
        choice = body["choices"][0]
        finished[choice["finish_reason"]] += 1
        if choice["finish_reason"] == "stop":
            text = choice["message"]["content"]
            checker = Draft202012Validator(exact(json.dumps(schema)), format_checker=FORMATS)
            checker.validate(exact(text))
            assert text == json.dumps(json.loads(text), ensure_ascii=False) or "\\" in text or "." in text
    print(f"{len(HELD)} of 100 schemas accepted, answers ended: {dict(finished)}")
    assert len(HELD) >= 85 and finished["stop"] >= 80 and finished["stop"] + finished["length"] == len(HELD)


def test_streamed_alone_and_again_it_is_the_same_answer(undisturbed: Service) -> None:
    for seed in range(3):
        asked: dict[str, Any] = {
            "temperature": 1,
            "seed": seed,
            "max_tokens": 60,
            "response_format": form(PERSON),
        }
        whole = undisturbed.complete("A person: ", **asked)
        assert whole["finish_reason"] == "stop" and set(strict_json(whole["text"])) == {"name", "age"}
        assert streamed(undisturbed.url, "A person: ", **asked) == whole["text"]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}, "max_tokens": 12}, r"\{.*"),
        ({"structured_outputs": {"choice": ["yes", "no", "a.b"]}}, r"yes|no|a\.b"),
        ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}, "min_tokens": 30}, "[0-9]{3}-[0-9]{4}"),
        ({"structured_outputs": {"grammar": 'start: "(" start ")" | "x"'}, "temperature": 2.0}, r"\(*x?\)*"),
        ({"guided_choice": ["été", "😀"], "logit_bias": {"2": 100}, "top_k": 1}, "été|😀"),
        ({"guided_json": {"const": "a"}, "frequency_penalty": 2, "repetition_penalty": 1.5}, '"a"'),
    ],
)
def test_other_forms_with_other_rules(fields: dict[str, Any], pattern: str, undisturbed: Service) -> None:
    answer = undisturbed.complete("Say something: ", **{"max_tokens": 40, "logprobs": 2, **fields})
    assert re.fullmatch(pattern, answer["text"]), answer["text"]
    if fields.get("max_tokens") != 12 and answer["finish_reason"] == "length":
        pytest.fail(f"not ended: {answer['text']}")


def test_cut_by_max_tokens(undisturbed: Service) -> None:
    answer = undisturbed.complete("A person: ", max_tokens=3, response_format=form(PERSON))
    assert answer["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 3
    assert '{"name": "'.startswith(answer["text"][:10])


def test_a_grammar_that_asks_for_too_much_stops_nobody(undisturbed: Service) -> None:
    """Refused at the edge, while another answer streams on."""
    body = completion("x", structured_outputs={"regex": "(a{1000}){1000}"})
    with ThreadPoolExecutor(4) as pool:
        refused = [pool.submit(undisturbed.post, "/v1/completions", body) for _ in range(3)]
        other = pool.submit(undisturbed.complete, "Once upon a time", max_tokens=12, ignore_eos=True)
        assert other.result()["usage"]["completion_tokens"] == 12
    for answer in refused:
        assert answer.result().status_code == 400
        assert answer.result().json()["error"]["param"] == "structured_outputs.regex"


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    lives: int = Field(ge=1, le=9)


def test_the_sdk_parses_into_a_model(undisturbed: Service) -> None:
    with openai.OpenAI(base_url=undisturbed.url + "/v1", api_key="any", max_retries=0) as client:
        asked: Any = [{"role": "user", "content": "Which pet?"}]
        answer = client.chat.completions.parse(
            model=MODEL, messages=asked, response_format=Pet, max_tokens=40, n=2
        )
        for choice in answer.choices:
            assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Pet)
        with client.chat.completions.stream(
            model=MODEL, messages=asked, response_format=Pet, max_tokens=40
        ) as stream:
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Pet)
