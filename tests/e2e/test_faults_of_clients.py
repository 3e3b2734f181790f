"""Faults that users of servers like ours have met, on one real service: groups F and G, by their numbers.

`pytest -k BR_092` finds what there is about one. Sampling has a file of its own; those where the cluster's words
must be forced are in `tests/coordinator/test_faults_of_clients.py`. When all are through (`undisturbed`) the
workers are the same processes, idle, and a witness says what it said before, to the last bit.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.service import Service, chat, completion, events, refusals, strict_json

VOCAB = 49152
END = 2


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


def test_BR_093_an_answer_of_no_tokens(undisturbed: Service) -> None:
    wrong: tuple[Any, ...] = (0, -1, 10**18, 1e18, "5", True)
    for max_tokens in wrong:
        assert refusals(undisturbed, "/v1/completions", {"max_tokens": max_tokens})["param"] == "max_tokens"
        if max_tokens != 0:
            bad = {"max_tokens": max_tokens, "echo": True}
            assert refusals(undisturbed, "/v1/completions", bad)["param"] == "max_tokens"
    for logprobs in (None, 0, 1):
        answer = undisturbed.complete("One, two,", max_tokens=0, echo=True, logprobs=logprobs)
        assert (answer["text"], answer["usage"]["completion_tokens"]) == ("One, two,", 0)
        count = answer["usage"]["prompt_tokens"]
        assert logprobs is None or len(answer["logprobs"]["token_logprobs"]) == count
    assert undisturbed.complete("One, two,", max_tokens=None, stop=["e"])["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    "biases",
    [
        {"999999": 5},
        {str(VOCAB): 1},
        {"-1": 5},
        {"AI": -100},
        {"1": 1, "01": -100},
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


@pytest.mark.parametrize(
    "prompt", [[-1], [VOCAB], [5, VOCAB], [2**63], [2**64], [1.5], [True], [5, "a"], [[-1]]]
)
def test_BR_097_prompt_ids_that_are_no_tokens(undisturbed: Service, prompt: list[Any]) -> None:
    assert refusals(undisturbed, "/v1/completions", {"prompt": prompt})["param"].startswith("prompt")


def test_BR_097_the_last_token_of_the_vocabulary_is_one(undisturbed: Service) -> None:
    assert undisturbed.complete([VOCAB - 1, 0], max_tokens=1)["usage"]["prompt_tokens"] == 2


def test_BR_103_more_choices_than_a_request_may_have(undisturbed: Service) -> None:
    for n in (0, -1, 129, 10_000, 2**63, 1.5, True, "2"):
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert refusals(undisturbed, path, {"n": n})["param"] == "n"
    assert refusals(undisturbed, "/v1/completions", {"n": 3, "best_of": 2})["param"] == "best_of"
    assert refusals(undisturbed, "/v1/completions", {"n": 65, "prompt": ["a", "b"]})["param"] == "n"
    assert refusals(undisturbed, "/v1/completions", {"prompt": ["a", [1]]})["param"] == "prompt"


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
        '"metadata": ' + '{"a":' * 30_000 + "1" + "}" * 30_000,
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
    bodies = [completion(prompt, max_tokens=3, ignore_eos=True) for prompt in prompts]
    alone = [undisturbed.complete(prompt, max_tokens=3, ignore_eos=True)["text"] for prompt in prompts]
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


def test_BR_112_every_token_of_a_prompt_is_scored(undisturbed: Service, text_ids: list[int]) -> None:
    """However narrow the sampling, cold and with the prompt in the caches."""
    for prompt in (text_ids[400:405], text_ids[420:453], text_ids[420:453]):
        for logprobs in (0, 1):
            fields = {"echo": True, "temperature": 1, "top_k": 1, "seed": 1, "max_tokens": 2}
            answer = undisturbed.complete(prompt, logprobs=logprobs, ignore_eos=True, **fields)
            said = answer["logprobs"]
            assert said["token_logprobs"][0] is None and len(said["tokens"]) == len(prompt) + 2
            for name, value, top in list(zip(*(said[k] for k in SCORES), strict=True))[1:]:
                assert top[name] == value <= 0 and len(top) in (logprobs, logprobs + 1), (name, top)


SCORES = ("tokens", "token_logprobs", "top_logprobs")


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


def test_BR_115_usage_of_several_choices(undisturbed: Service, text_ids: list[int]) -> None:
    """Streamed as whole: a prompt counts once, each answer counts; and a choice is the same however it is sent."""
    for fields, choices in (
        ({"n": 3, "prompt": text_ids[1200:1240]}, 3),
        ({"n": 2, "prompt": ["One, two,", "A B C"]}, 4),
        ({"n": 1, "prompt": [[5, 6, 7], [8, 9]]}, 2),
    ):
        body = completion("", max_tokens=6, temperature=1, seed=2, stop=["e"]) | fields
        whole = undisturbed.post("/v1/completions", body).json()
        counting = body | {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = events(iter(undisturbed.post("/v1/completions", counting).text.splitlines()))
        texts = [""] * choices
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == [choice["text"] for choice in whole["choices"]]
        used = [{**usage, "prompt_tokens_details": None} for usage in (last["usage"], whole["usage"])]
        assert used[0] == used[1] and choices <= used[0]["completion_tokens"] <= 6 * choices
        if fields["n"] == 3:
            assert used[0]["prompt_tokens"] == 40 and len(set(texts)) > 1


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
