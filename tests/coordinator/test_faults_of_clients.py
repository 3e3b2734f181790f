"""Faults that users of servers like ours have met, where what the cluster says must be forced: by their numbers.

`pytest -k BR_080` finds what there is about one. Those that need workers are in
`tests/e2e/test_faults_of_clients.py`; `tests/test_faults.py` sees to it that none is left out.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.errors import RequestFailed
from common.request import Request, unpack_ids
from coordinator.door.limits import Limits
from coordinator.http_api import create_app
from coordinator.openai.messages import Chat
from coordinator.tokenizer import Tokenizer
from tests.coordinator.scripted_gateway import Script, ScriptedGateway, Served, serving

CHAT: dict[str, Any] = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "smol", "prompt": "hi"}
ROUTES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
END = 2


@pytest.fixture(scope="module")
def id_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for id in range(tokenizer.vocab_size):
        if raw := tokenizer.text_bytes(id):
            found.setdefault(raw, id)
    return found


def pieces(client: httpx.Client, route: str, **fields: Any) -> tuple[list[str], str]:
    """What a stream shows, chunk by chunk, and why it ends."""
    body = ROUTES[route] | fields | {"stream": True}
    *blocks, done, _ = client.post(route, json=body).text.split("\n\n")
    assert done == "data: [DONE]", blocks
    choices = [json.loads(block.removeprefix("data: "))["choices"][0] for block in blocks]
    texts = [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]
    return [text for text in texts if text], choices[-1]["finish_reason"]


def whole(client: httpx.Client, route: str, **fields: Any) -> tuple[str, str, int]:
    """Text, reason and billed tokens of an answer in one piece."""
    response = client.post(route, json=ROUTES[route] | fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, choice["finish_reason"], response.json()["usage"]["completion_tokens"]


def both(client: httpx.Client, route: str, **fields: Any) -> tuple[str, str]:
    """Text and reason, which a stream and a whole answer must agree on."""
    shown, reason = pieces(client, route, **fields)
    text, finish, _ = whole(client, route, **fields)
    assert ("".join(shown), reason) == (text, finish)
    return text, finish


def refusal(client: httpx.Client, route: str, **fields: Any) -> dict[str, Any]:
    """The error object of a 400, the same when a stream was asked for."""
    plain = client.post(route, json=ROUTES[route] | fields)
    streamed = client.post(route, json=ROUTES[route] | fields | {"stream": True})
    assert plain.status_code == 400, plain.text
    assert (streamed.status_code, streamed.json()) == (400, plain.json())
    error: dict[str, Any] = plain.json()["error"]
    return error


# ---------------------------------------------------------------- F. text out of tokens


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (1, 2), (1, 3), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("route", ROUTES)
def test_BR_080_an_emoji_split_over_tokens(
    served: Served, client: httpx.Client, id_of: dict[bytes, int], route: str, cuts: tuple[int, ...]
) -> None:
    raw = "😀".encode()
    parts = [raw[begin:end] for begin, end in zip((0, *cuts), (*cuts, 4), strict=True)]
    if any(part not in id_of for part in parts):
        parts = [raw[index : index + 1] for index in range(4)]
    ids = [id_of[b"a"], *(id_of[part] for part in parts), id_of[b"b"]]
    served.gateway.answers(*ids)
    assert pieces(client, route)[0] == ["a", "😀", "b"]
    for kept in range(1, len(parts)):  # cut by max_tokens inside the character
        served.gateway.answers(*ids[: 1 + kept])
        assert pieces(client, route) == (["a", "\ufffd"], "length")
        assert whole(client, route) == ("a\ufffd", "length", 1 + kept)


def test_BR_081_junk_bytes_end_no_answer_and_touch_no_other(
    served: Served, client: httpx.Client, tokenizer: Tokenizer, id_of: dict[bytes, int]
) -> None:
    """Two hundred answers of bytes that are no text, eight at once, beside one that is."""
    good = tokenizer.encode_now("The ferry leaves at nine. " * 3)
    partial = [id for raw, id in id_of.items() if _is_partial(raw)]
    assert len(partial) > 100

    def script(request: Request) -> Script:
        if request.sampling.seed == 0:
            return Script(good, gap_s=0.002)
        chance = random.Random(request.sampling.seed)
        return Script(
            [chance.choice(partial) for _ in range(chance.randrange(1, 40))], group=chance.randrange(1, 4)
        )

    served.gateway.script = script

    def ask(seed: int) -> str:
        return both(client, "/v1/completions", seed=seed, logprobs=2, stop=["\ufffd!", "ab"])[0]

    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(ask, [0, *range(1, 100), 0, *range(100, 200), 0]))
    assert [texts[0], texts[100], texts[-1]] == ["The ferry leaves at nine. " * 3] * 3
    assert sum("\ufffd" in text for text in texts) > 100


def _is_partial(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return True
    return False


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("ABCDEFGHIJKL", ["DEFGHIJ"], "ABC"),
        ("ABCDEFGHIxKL", ["DEFGHIJ"], "ABCDEFGHIxKL"),
        ("ABCDEFGHI", ["DEFGHIJ"], "ABCDEFGHI"),
        ("ABCDEF", ["CD", "CDEF"], "AB"),
        ("ABCDEF", ["CDEF", "DE"], "ABC"),
        ("ABCDEF", ["CDE", "DE"], "AB"),
        ("go 世界 now", ["界 n"], "go 世"),
        ("go 😀 now", ["😀"], "go "),
    ],
)
def test_BR_084_nothing_of_a_stop_string_is_shown(
    served: Served,
    client: httpx.Client,
    id_of: dict[bytes, int],
    route: str,
    text: str,
    stops: list[str],
    kept: str,
) -> None:
    """Byte by byte, then in tokens of two and three bytes where there are such: a stop begins inside them."""
    for longest in (1, 2, 3):
        ids, raw = [], text.encode()
        while raw:
            size = next(size for size in range(longest, 0, -1) if raw[:size] in id_of)
            ids.append(id_of[raw[:size]])
            raw = raw[size:]
        served.gateway.answers(*ids)
        assert both(client, route, stop=stops)[0] == kept


@pytest.mark.parametrize("route", ROUTES)
def test_BR_086_the_first_token_is_the_stop_and_logprobs_are_asked(
    served: Served, client: httpx.Client, id_of: dict[bytes, int], route: str
) -> None:
    served.gateway.answers(id_of[b"\n"], id_of[b"a"])
    asked = {"logprobs": True, "top_logprobs": 5} if "chat" in route else {"logprobs": 5}
    assert both(client, route, stop=["\n"], **asked) == ("", "stop")
    logprobs = client.post(route, json=ROUTES[route] | asked | {"stop": "\n"}).json()["choices"][0][
        "logprobs"
    ]
    assert logprobs["content" if "chat" in route else "tokens"] == []


@pytest.mark.parametrize("route", ROUTES)
def test_BR_087_a_stop_of_several_tokens(
    served: Served, client: httpx.Client, tokenizer: Tokenizer, route: str
) -> None:
    served.gateway.answers(*tokenizer.encode_now("L M N O P Q R S T"), END, finish="stop")
    assert both(client, route, stop=["O P Q"]) == ("L M N ", "stop")
    assert both(client, route, stop=["O Q"]) == ("L M N O P Q R S T", "stop")


@pytest.mark.parametrize("route", ROUTES)
def test_BR_088_stops_that_are_none_and_stops_that_are_too_much(
    served: Served, client: httpx.Client, tokenizer: Tokenizer, route: str
) -> None:
    served.gateway.answers(*tokenizer.encode_now("one two"))
    nothing: tuple[Any, ...] = ([], None)
    too_much: tuple[Any, ...] = ("", [""], ["a", ""], ["x"] * 17, "y" * 10_000, ["y" * 10_000], 5, [None], {})
    for stop in nothing:
        assert both(client, route, stop=stop) == ("one two", "length")
    for stop in too_much:
        assert refusal(client, route, stop=stop)["param"] == "stop"
    assert both(client, route, stop=["q", "r", "s", "x", " two"])[0] == "one"


def test_BR_090_a_chat_begins_with_what_its_template_says_and_no_more(
    served: Served, client: httpx.Client, tokenizer: Tokenizer
) -> None:
    served.gateway.answers(END, finish="stop")
    client.post("/v1/chat/completions", json=CHAT)
    (asked,) = served.gateway.requests
    ids = unpack_ids(asked.prompt_ids)
    start = tokenizer.encode_now("<|im_start|>")
    assert len(start) == 1
    rendered = tokenizer.render_chat(Chat([{"role": "user", "content": "hi"}]))
    assert ids[:1] == start and ids[1:2] != start
    assert ids.count(start[0]) == rendered.count("<|im_start|>")


@pytest.mark.parametrize("route", ROUTES)
def test_BR_091_a_marker_stays_whole_in_the_joined_text(
    served: Served, client: httpx.Client, id_of: dict[bytes, int], route: str
) -> None:
    for text, kept in (("a</think>9.9 b", "a</think>9.9 b"), ("a</think>9.8 b", "a</think>")):
        served.gateway.answers(*(id_of[bytes([byte])] for byte in text.encode()))
        assert both(client, route, stop=["9.8", "</thinker>"])[0] == kept


# ---------------------------------------------------------------- G. requests and shapes

STRICT = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('begin with the user') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "{% if loop.index > 1 and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def strict(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose template is particular."""
    folder = tmp_path_factory.mktemp("strict")
    for name in ("tokenizer.json", "config.json", "tokenizer_config.json"):
        shutil.copy(smollm2_dir / name, folder / name)
    (folder / "chat_template.jinja").write_text(STRICT)
    tokenizer, gateway = Tokenizer(folder), ScriptedGateway()
    gateway.answers(END, finish="stop")
    app = create_app(gateway, tokenizer, gateway.metrics, served_models=("smol",), limits=Limits())
    with serving(app, gateway) as served:
        yield served
    tokenizer.close()


def message(role: str, content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("messages", "status", "says"),
    [
        ([message("assistant")], 400, "begin with the user"),
        ([message("user"), message("user")], 400, "roles must alternate"),
        ([message("user"), message("system")], 400, "system comes first"),
        ([message("wizard")], 400, "role"),
        ([message("user", None)], 400, "content"),
        ([message("user"), message("tool")], 400, "tool_call_id"),
        ([message("user", [{"type": "image_url", "image_url": {"url": "x"}}])], 422, "image_url"),
        ([message("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], 200, ""),
    ],
)
def test_BR_106_a_template_says_why_it_refuses(
    strict: Served, messages: list[dict[str, Any]], status: int, says: str
) -> None:
    answers = [
        httpx.post(
            strict.url + "/v1/chat/completions",
            json=CHAT | {"messages": messages, "stream": stream},
            verify=False,
        )
        for stream in (False, True)
    ]
    assert [answer.status_code for answer in answers] == [status] * 2, answers[0].text
    if status != 200:
        assert answers[0].json() == answers[1].json()
        assert says in answers[0].json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_BR_107_prompt_and_answer_against_the_context(
    served: Served, client: httpx.Client, stream: bool
) -> None:
    served.gateway.context = 100
    served.gateway.answers(END, finish="stop")
    for length, max_tokens, taken in [
        (99, None, 1),
        (99, 1, 1),
        (99, 2, None),
        (99, 100, None),
        (50, 50, 50),
        (50, 51, None),
        (100, None, None),
        (100, 1, None),
        (101, 1, None),
        (300, None, None),
    ]:
        body = TEXT | {"prompt": [5] * length, "max_tokens": max_tokens, "stream": stream}
        response = client.post("/v1/completions", json=body)
        if taken is not None:
            assert response.status_code == 200, (length, max_tokens)
            assert served.gateway.requests[-1].sampling.max_tokens == taken
        else:
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
            assert str(length) in error["message"] and "100" in error["message"]


def test_BR_108_an_error_does_not_grow_with_what_is_wrong(client: httpx.Client) -> None:
    wrong = [{"role": 7, "content": "secret " * 150}] * 10_000
    response = client.post("/v1/chat/completions", json=CHAT | {"messages": wrong[:900]})
    assert response.status_code == 400
    assert len(response.content) < 2000 and "secret" not in response.text


def test_BR_114_names_of_tokens_that_are_no_text(
    served: Served, client: httpx.Client, id_of: dict[bytes, int]
) -> None:
    served.gateway.answers(*(id_of["😀".encode()[index : index + 1]] for index in range(4)))
    for top in ({}, {"top_logprobs": 0}, {"top_logprobs": 20}):
        body = CHAT | {"logprobs": True, **top}
        content = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "😀"
        assert all(entry["token"].isprintable() for entry in content)
        assert {len(entry["top_logprobs"]) for entry in content} == {top.get("top_logprobs", 0)}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("group", [1, 3, 100])
def test_BR_115_usage_of_a_stream_is_that_of_the_whole(
    served: Served, client: httpx.Client, tokenizer: Tokenizer, route: str, group: int
) -> None:
    served.gateway.answers(
        *tokenizer.encode_now("a 😀 b 世界 c"), END, finish="stop", group=group, cached_tokens=3
    )
    for stop in ([], ["b"]):
        usage = client.post(route, json=ROUTES[route] | {"stop": stop}).json()["usage"]
        body = ROUTES[route] | {"stop": stop, "stream": True, "stream_options": {"include_usage": True}}
        *blocks, done, _ = client.post(route, json=body).text.split("\n\n")
        *before, last = [json.loads(block.removeprefix("data: ")) for block in blocks]
        assert (last["choices"], last["usage"], done) == ([], usage, "data: [DONE]")
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in before)
        plain = client.post(route, json=ROUTES[route] | {"stop": stop, "stream": True}).text
        assert '"usage"' not in plain


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("ends", "finish", "fields", "reason"),
    [
        ([], "length", {"ignore_eos": True}, "length"),
        ([END], "length", {"ignore_eos": True}, "length"),
        ([END], "stop", {}, "stop"),
        ([], "length", {"stop": ["two"]}, "stop"),
    ],
)
def test_BR_116_the_reason_is_what_ended_it(
    served: Served,
    client: httpx.Client,
    tokenizer: Tokenizer,
    route: str,
    ends: list[int],
    finish: str,
    fields: dict[str, Any],
    reason: str,
) -> None:
    ids = [*tokenizer.encode_now("one two"), *ends]
    served.gateway.answers(*ids, finish=finish)
    assert both(client, route, max_tokens=len(ids), **fields)[1] == reason


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("after", [1, 3])
def test_BR_118_a_failure_after_the_status_line_is_said_in_the_stream(
    served: Served, client: httpx.Client, tokenizer: Tokenizer, route: str, after: int
) -> None:
    """And one before it has its status."""
    ids = tokenizer.encode_now("one two three four")
    served.gateway.answers(*ids, error=RequestFailed("decode failed", code="decode"), error_after=after)
    text = client.post(route, json=ROUTES[route] | {"stream": True}).text
    assert "[DONE]" not in text
    assert text.rstrip().split("\n\n")[-1].startswith("event: error\ndata: {")
    served.gateway.answers(*ids, error=RequestFailed("prefill failed", code="prefill"))
    assert client.post(route, json=ROUTES[route] | {"stream": True}).status_code == 500
