"""Faults that users of servers like ours have met with sampling, on one real service: by their numbers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.service import Service, completion, refusals, strict_json

VOCAB = 49152
NEWLINE, COMMA, END = 198, 28, 2


def test_BR_085_min_tokens_holds_for_stop_strings_ids_and_the_end(undisturbed: Service) -> None:
    ends: list[dict[str, Any]] = [
        {"stop": ["\n", ",", " ", "o", "e"]},
        {"stop_token_ids": [NEWLINE, COMMA]},
        {"logit_bias": {str(END): 100}},
    ]
    body: dict[str, Any] = {"min_tokens": 6, "max_tokens": 6, "seed": 1}

    def count(fields: dict[str, Any]) -> int:
        return int(undisturbed.complete("One, two,", **body, **fields)["usage"]["completion_tokens"])

    asked = [fields | {"temperature": temperature} for fields in ends for temperature in (0, 1)]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(count, asked)) == [6] * 6


def test_BR_096_banned_ends_are_banned_in_their_own_row(undisturbed: Service, text_ids: list[int]) -> None:
    prompt, fields = text_ids[60:90], {"max_tokens": 8, "ignore_eos": True, "logprobs": 3}
    alone = undisturbed.complete(prompt, **fields)

    def ban(index: int) -> int:
        answer = undisturbed.complete(
            [index + 9], min_tokens=6, max_tokens=6, stop_token_ids=[VOCAB - 1, 0, *range(100, 220)]
        )
        return int(answer["usage"]["completion_tokens"])

    with ThreadPoolExecutor(7) as threads:
        beside = threads.submit(undisturbed.complete, prompt, **fields)
        assert list(threads.map(ban, range(6))) == [6] * 6
        together = beside.result()
    assert (together["text"], together["logprobs"]) == (alone["text"], alone["logprobs"])


def test_BR_098_seeds_at_the_ends_of_their_range(undisturbed: Service) -> None:
    wrong: tuple[Any, ...] = (2**64, 2**63, -(2**63) - 1, 1.5, "7", True, [])
    for seed in wrong:
        assert refusals(undisturbed, "/v1/completions", {"seed": seed})["param"] == "seed"

    def ask(seed: int) -> str:
        return str(undisturbed.complete("Once", max_tokens=4, temperature=1, seed=seed)["text"])

    seeds = (0, 1, -1, 2**63 - 1, -(2**63))
    with ThreadPoolExecutor(10) as threads:
        texts = list(threads.map(ask, [*seeds, *seeds]))
    assert texts[:5] == texts[5:]
    assert len(set(texts)) > 3, "0 is a seed like another"


SAMPLING: list[dict[str, Any]] = [
    *({"temperature": value} for value in (1e-6, 1e-4, -0.0, 1e-300, 100)),
    *({"top_p": value} for value in (1e-9, 1e-300, 1)),
    *({"top_k": value} for value in (0, -1, 1, VOCAB, VOCAB + 1, 2**31, 2**63)),
    *({"min_p": value} for value in (1, 1e-300)),
    {"repetition_penalty": 1e-9, "temperature": 1e-4},
    {"repetition_penalty": 100, "presence_penalty": 2, "frequency_penalty": -2},
    {"temperature": 0.01, "top_k": 1, "logit_bias": {"2": -100, "28": -100}},
]


@pytest.fixture(scope="module")
def sampled(shared: Service) -> dict[str, dict[str, Any]]:
    """Answers to all of `SAMPLING` at once, and to none of it (""), with log-probabilities; strictly JSON."""
    asked = [{}, *SAMPLING]

    def ask(fields: dict[str, Any]) -> dict[str, Any]:
        body = {"temperature": 1, "seed": 3, "max_tokens": 3, "logprobs": 5, "ignore_eos": True} | fields
        answer = shared.post("/v1/completions", completion("One, two,", **body))
        assert answer.status_code == 200, (fields, answer.text)
        choice: dict[str, Any] = strict_json(answer.text)["choices"][0]
        return choice

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, asked))
    return {json.dumps(fields): answer for fields, answer in zip(asked, answers, strict=True)}


def test_BR_099_BR_101_the_ends_of_every_range_give_numbers(
    undisturbed: Service, sampled: dict[str, dict[str, Any]]
) -> None:
    for fields, answer in sampled.items():
        logprobs = answer["logprobs"]
        assert len(logprobs["token_logprobs"]) == 3, fields
        values = [*logprobs["token_logprobs"], *(v for top in logprobs["top_logprobs"] for v in top.values())]
        assert all(-9999 <= value <= 0 for value in values), (fields, values)
    greedy = undisturbed.complete("One, two,", max_tokens=3, ignore_eos=True)["text"]
    for name, value in (("temperature", 1e-6), ("temperature", -0.0), ("temperature", 1e-300), ("top_k", 1)):
        assert sampled[json.dumps({name: value})]["text"] == greedy, name


def test_BR_099_beyond_their_ranges_they_are_refused(undisturbed: Service) -> None:
    outside: dict[str, tuple[float, ...]] = {
        "temperature": (-1, 101),
        "top_p": (0, 1.1),
        "min_p": (-1, 1.1),
        "top_k": (-2,),
    }
    for field, values in outside.items():
        for value in values:
            assert refusals(undisturbed, "/v1/completions", {field: value})["param"] == field


def test_BR_100_more_than_the_vocabulary_is_all_of_it(sampled: dict[str, dict[str, Any]]) -> None:
    for top_k in (0, -1, VOCAB, VOCAB + 1, 2**31, 2**63):
        assert sampled[json.dumps({"top_k": top_k})] == sampled["{}"]


def test_BR_117_a_seed_is_a_seed_in_any_company(undisturbed: Service) -> None:
    seeded: dict[str, Any] = {
        "seed": 42,
        "temperature": 1,
        "max_tokens": 8,
        "logprobs": 2,
        "ignore_eos": True,
    }

    def ask(fields: dict[str, Any]) -> dict[str, Any]:
        answer = undisturbed.complete("Once upon a time", **{"temperature": 1, "max_tokens": 8} | fields)
        return {key: answer[key] for key in ("text", "logprobs", "finish_reason")}

    alone = ask(seeded)
    company = [seeded, {}, {"seed": 43}, seeded, {}, {"temperature": 0}, seeded, {"top_k": 3}]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, company))
    assert [answers[index] for index in (0, 3, 6)] == [alone] * 3
    assert answers[2]["text"] != alone["text"]
