"""Faults that users of servers like ours have met, on one real service: groups F and G, by their numbers.

`pytest -k BR_092` finds what there is about one; those where the cluster's words must be forced are in
`tests/coordinator/test_faults_of_clients.py`. When all are through (`undisturbed`) the workers are the same
processes, idle, and a witness says what it said before, to the last bit.
"""

from __future__ import annotations

import ast
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.service import ROOT, Service, chat, completion, strict_json

VOCAB = 49152
NEWLINE, COMMA, END = 198, 28, 2
WAITING = {93, 103, 112}  # echo and n


def refusals(service: Service, path: str, bad: dict[str, Any]) -> dict[str, Any]:
    """The error object of a 400, whole and streamed alike."""
    good = chat("hi") if "chat" in path else completion("One, two,")
    answers = [service.post(path, good | bad | {"stream": stream}) for stream in (False, True)]
    assert [answer.status_code for answer in answers] == [400, 400], (bad, answers[0].text)
    assert answers[0].json() == answers[1].json()
    error: dict[str, Any] = answers[0].json()["error"]
    assert error["message"] and error["code"]
    return error


def test_every_entry_of_groups_F_and_G_has_a_test() -> None:
    entries = {*range(80, 119)} - {82, 83, 104, 113}  # numbers that the list does not have
    named: set[int] = set()
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                named |= {int(number) for number in re.findall(r"BR_(\d{3})", node.name)}
    assert entries - named == WAITING


# ---------------------------------------------------------------- F


def test_BR_085_min_tokens_holds_for_stop_strings_ids_and_the_end(undisturbed: Service) -> None:
    for fields in (
        {"stop": ["\n", ",", " ", "o", "e"]},
        {"stop_token_ids": [NEWLINE, COMMA]},
        {"logit_bias": {str(END): 100}},
    ):
        for temperature in (0, 1):
            body: dict[str, Any] = {"min_tokens": 6, "max_tokens": 6, "temperature": temperature, "seed": 1}
            answer = undisturbed.complete("One, two,", **fields, **body)
            assert answer["usage"]["completion_tokens"] == 6, (fields, answer)


# ---------------------------------------------------------------- G


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], None, [None]])
def test_BR_092_a_prompt_of_nothing(undisturbed: Service, prompt: Any) -> None:
    assert refusals(undisturbed, "/v1/completions", {"prompt": prompt})["param"] == "prompt"


def test_BR_092_a_chat_of_nothing(undisturbed: Service) -> None:
    assert refusals(undisturbed, "/v1/chat/completions", {"messages": []})["param"] == "messages"
    nothing: tuple[Any, ...] = ("", [])
    for empty in nothing:  # the template has words of its own, so there is a prompt
        messages = [{"role": "user", "content": empty}]
        answer = undisturbed.post("/v1/chat/completions", chat("x", max_tokens=1) | {"messages": messages})
        assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] > 3


@pytest.mark.parametrize(
    "biases",
    [
        {"999999": 5},
        {str(VOCAB): 1},
        {"-1": 5},
        {"AI": -100},
        {"5": 1e9},
        {"5": -101},
        {"5": "1"},
        {"5": None},
    ]
    + [{str(id): 1 for id in range(count)} for count in (1025, 5000)],
)
def test_BR_094_BR_095_biases_that_are_none(undisturbed: Service, biases: dict[str, Any]) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        error = refusals(undisturbed, path, {"logit_bias": biases})
        assert error["param"].startswith("logit_bias") and len(error["message"]) < 400


def test_BR_095_lists_as_long_as_they_may_be(undisturbed: Service) -> None:
    biases = {str(id): -1 for id in range(1024)}
    answer = undisturbed.complete(
        "One, two,", max_tokens=3, logit_bias=biases, stop_token_ids=list(range(9000, 9128)), min_tokens=2
    )
    assert answer["usage"]["completion_tokens"] >= 2
    error = refusals(undisturbed, "/v1/completions", {"stop_token_ids": [5] * 2000})
    assert error["param"] == "stop_token_ids"


@pytest.mark.parametrize("ids", [[VOCAB], [-1], [2**31], [5, 2**63]])
def test_BR_096_stop_ids_that_are_no_tokens(undisturbed: Service, ids: list[int]) -> None:
    """With min_tokens they would be columns to ban, in whoever's row lies there."""
    error = refusals(undisturbed, "/v1/completions", {"stop_token_ids": ids, "min_tokens": 5})
    assert error["param"] == "stop_token_ids"


def test_BR_096_banned_ends_are_banned_in_their_own_row(undisturbed: Service, text_ids: list[int]) -> None:
    prompt, fields = text_ids[60:90], {"max_tokens": 12, "ignore_eos": True, "logprobs": 3}
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


@pytest.mark.parametrize(
    "prompt", [[-1], [VOCAB], [5, VOCAB], [2**63], [2**64], [1.5], [True], [5, "a"], [[-1]]]
)
def test_BR_097_prompt_ids_that_are_no_tokens(undisturbed: Service, prompt: list[Any]) -> None:
    assert refusals(undisturbed, "/v1/completions", {"prompt": prompt})["param"].startswith("prompt")


def test_BR_097_the_last_token_of_the_vocabulary_is_one(undisturbed: Service) -> None:
    assert undisturbed.complete([VOCAB - 1, 0], max_tokens=1)["usage"]["prompt_tokens"] == 2


def test_BR_098_seeds_at_the_ends_of_their_range(undisturbed: Service) -> None:
    wrong: tuple[Any, ...] = (2**64, 2**63, -(2**63) - 1, 1.5, "7", True, [])
    for seed in wrong:
        assert refusals(undisturbed, "/v1/completions", {"seed": seed})["param"] == "seed"
    texts = {}
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        twice = [
            undisturbed.complete("Once", max_tokens=4, temperature=1, seed=seed)["text"] for _ in range(2)
        ]
        assert twice[0] == twice[1]
        texts[seed] = twice[0]
    assert len(set(texts.values())) > 3, "0 is a seed like another"


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


@pytest.mark.parametrize(
    "field", ['"temperature": NaN', '"top_p": Infinity', '"logit_bias": {"5": -Infinity}', '"min_p": 1e309']
)
def test_BR_102_numbers_that_json_does_not_have(undisturbed: Service, field: str) -> None:
    for path, body in (("/v1/completions", completion("hi")), ("/v1/chat/completions", chat("hi"))):
        body = {key: value for key, value in body.items() if key != "temperature"}
        answer = undisturbed.post(path, json.dumps(body)[:-1] + ", " + field + "}")
        assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_BR_105_text_that_is_none(undisturbed: Service) -> None:
    """Half of a surrogate pair, anywhere; U+0000 is a character like another."""
    half = "a\ud83d"
    for bad in ({"prompt": half}, {"prompt": [half]}, {"stop": half}, {"user": half}, {"cache_salt": half}):
        assert refusals(undisturbed, "/v1/completions", bad)["param"] == next(iter(bad))
    for content in (half, [{"type": "text", "text": half}]):
        messages = [{"role": "user", "content": content}]
        assert refusals(undisturbed, "/v1/chat/completions", {"messages": messages})["param"]
    for name in ("\ud83d", "\x00"):
        answer = undisturbed.post("/v1/completions", completion("hi") | {name: 1})
        assert answer.status_code == 422
    assert undisturbed.complete("a\x00b", max_tokens=1, stop=["\x00"])["usage"]["prompt_tokens"] >= 2


@pytest.mark.parametrize(
    "tail",
    [
        '"tools": ' + "[" * 3000 + "]" * 3000,
        '"metadata": ' + '{"a":' * 100_000 + "1" + "}" * 100_000,
        '"logit_bias": ' + '{"5":' * 40 + "1" + "}" * 40,
    ],
    ids=["lists", "objects", "forty"],
)
def test_BR_110_brackets_without_end(undisturbed: Service, tail: str) -> None:
    for body in (completion("hi"), chat("hi")):
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        answer = undisturbed.post(path, json.dumps(body)[:-1] + ", " + tail + "}")
        assert answer.status_code == 400, answer.text
        assert "levels deep" in answer.json()["error"]["message"]


def test_BR_111_one_id_for_many_requests(undisturbed: Service, text_ids: list[int]) -> None:
    """At once, after one that is left, and after one that is done: each has its own answer, all have the name."""
    prompts = [text_ids[50 * index : 50 * index + 20] for index in range(4)]
    bodies = [completion(prompt, max_tokens=5, ignore_eos=True) for prompt in prompts]
    alone = [undisturbed.complete(prompt, max_tokens=5, ignore_eos=True)["text"] for prompt in prompts]
    with httpx.Client(base_url=undisturbed.url, verify=False, headers={"x-request-id": "same"}) as client:

        def ask(body: dict[str, Any]) -> httpx.Response:
            return client.post("/v1/completions", json=body, timeout=60)

        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(ask, bodies))
        endless = bodies[0] | {"stream": True, "max_tokens": 4000}
        with client.stream("POST", "/v1/completions", json=endless, timeout=60) as left:
            next(left.iter_lines())
        answers += [ask(body) for body in bodies]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == alone * 2
    assert {answer.headers["x-request-id"] for answer in [*answers, left]} == {"same"}
    assert len({answer.json()["id"] for answer in answers}) == 8


def test_BR_111_every_route_and_every_error_says_the_name_back(undisturbed: Service) -> None:
    routes = undisturbed.get("/openapi.json")["paths"]
    assert {"/v1/completions", "/health", "/metrics", "/admin/workers"} <= routes.keys()
    asked = [(method, path) for path, methods in routes.items() for method in methods]
    asked += [("get", "/nope"), ("get", "/v1/completions"), ("delete", "/v1/models"), ("options", "/health")]
    statuses = set()
    with httpx.Client(base_url=undisturbed.url, verify=False, headers={"x-request-id": "mine"}) as client:
        for method, path in asked:
            for body in (b"", b"{", b'{"model": "none"}', b'{"x": 1}'):
                answer = client.request(method, path, content=body)
                assert answer.headers.get_list("x-request-id") == ["mine"], (method, path)
                assert answer.status_code < 500, (method, path, answer.text)
                statuses.add(answer.status_code)
                if answer.status_code >= 400:
                    assert answer.json()["error"]["code"], (method, path)
    assert {200, 400, 404, 405, 422} <= statuses


def test_BR_114_logprobs_of_an_answer_of_emoji(undisturbed: Service) -> None:
    """Bytes of an emoji are all that it may say; what they make may be text or not."""
    biases = {"10813": 90, "242": 90, "218": 90}
    for fields in ({}, {"top_logprobs": 0}, {"top_logprobs": 20}):
        asked = {"logprobs": True, "max_tokens": 6, "temperature": 1, "seed": 4, "logit_bias": biases}
        answer = undisturbed.post("/v1/chat/completions", chat("hi", **asked) | fields)
        (choice,) = strict_json(answer.text)["choices"]
        content = choice["logprobs"]["content"]
        raw = b"".join(bytes(entry["bytes"]) for entry in content)
        assert raw.decode("utf-8", "replace") == choice["message"]["content"]
        assert {len(entry["top_logprobs"]) for entry in content} == {fields.get("top_logprobs", 0)}


def test_BR_116_what_ended_it(undisturbed: Service, text_ids: list[int]) -> None:
    fields: dict[str, Any] = {"max_tokens": 5}
    free = undisturbed.complete("One, two, three,", ignore_eos=True, **fields)
    assert (free["finish_reason"], free["usage"]["completion_tokens"]) == ("length", 5)
    last = free["text"][-1]
    if last not in free["text"][:-1]:  # completed exactly by the last token
        stopped = undisturbed.complete("One, two, three,", stop=[last], ignore_eos=True, **fields)
        assert (stopped["finish_reason"], stopped["text"]) == ("stop", free["text"][:-1])
    end: dict[str, Any] = {"logit_bias": {str(END): 100}}
    for max_tokens, min_tokens in ((1, 0), (3, 2)):  # the end token, exactly at max_tokens
        ended = undisturbed.complete("One", max_tokens=max_tokens, min_tokens=min_tokens, **end)
        assert (ended["finish_reason"], ended["usage"]["completion_tokens"]) == ("stop", max_tokens)
    ignored = undisturbed.complete("One", max_tokens=3, ignore_eos=True, **end)
    assert (ignored["finish_reason"], ignored["text"]) == ("length", "")


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
