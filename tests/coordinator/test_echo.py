"""`echo` over real HTTP: the prompt's text and log-probabilities before every answer, whole, streamed, or alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from common.request import TokenLogprobs
from coordinator.answer import Piece
from coordinator.answer_size import MAX_ECHOED_BYTES
from coordinator.door.response_writer import ResponseWriter
from coordinator.echo import PIECE_TOKENS, Echo, echoed_prompt
from coordinator.gateway import TokenDelta
from coordinator.openai import shapes
from coordinator.openai.shapes import PART_ITEMS, _dumps, _in_parts
from coordinator.tokenizer import Tokenizer
from tests.coordinator.scripted_gateway import Script, Served, prompt_scores
from tests.coordinator.test_http_api import TEXT, events

PROMPT = "Ferry <|im_end|> 😀 says"
ANSWER = " hello wörld"
OTHER = "Another one"


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream as a whole answer has them."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            so_far = choices.setdefault(part["index"], {**part, "text": "", "logprobs": None})
            assert part["text"] or part["finish_reason"], "a chunk without text"
            so_far["text"] += part["text"]
            so_far["finish_reason"] = part["finish_reason"]
            for name, values in (part["logprobs"] or {}).items():
                so_far["logprobs"] = so_far["logprobs"] or {}
                so_far["logprobs"].setdefault(name, []).extend(values)
    return [choices[index] for index in sorted(choices)]


def both(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    """The whole answer, which the joined stream must equal."""
    whole = client.post("/v1/completions", json=TEXT | fields)
    assert whole.status_code == 200, whole.text
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(client.post("/v1/completions", json=TEXT | fields | options))
    assert joined(chunks) == whole.json()["choices"]
    assert chunks[-1]["usage"] == whole.json()["usage"]
    return whole.json()  # type: ignore[no-any-return]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("as_ids", [False, True])
def test_text_then_answer(
    served: Served, client: httpx.Client, tokenizer: Tokenizer, logprobs: int | None, as_ids: bool
) -> None:
    ids, answer = tokenizer.encode_now(PROMPT), tokenizer.encode_now(ANSWER)
    served.gateway.answers(*answer)
    found = both(client, prompt=ids if as_ids else PROMPT, echo=True, logprobs=logprobs)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT + ANSWER, "length")
    assert found["usage"]["prompt_tokens"] == len(ids)
    assert found["usage"]["completion_tokens"] == len(answer)
    assert served.gateway.requests[0].sampling.prompt_logprobs == logprobs
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    said = choice["logprobs"]
    assert {len(values) for values in said.values()} == {len(ids) + len(answer)}
    assert said["token_logprobs"][0] is None and said["top_logprobs"][0] is None
    scores = prompt_scores(ids, logprobs)
    assert said["token_logprobs"][1 : len(ids)] == [one.chosen for one in scores]
    for name, chosen, best in list(
        zip(said["tokens"], said["token_logprobs"], said["top_logprobs"], strict=True)
    )[1:]:
        assert best[name] == chosen, "BR-112: the token itself is always there"
        assert len(best) <= logprobs + 1
    before = b""
    for id, offset in zip([*ids, *answer], said["text_offset"], strict=True):
        assert offset == len(before.decode(errors="ignore")), "a cut character begins where it will stand"
        before += tokenizer.token_bytes(id)


def test_every_choice_of_every_prompt(served: Served, client: httpx.Client, tokenizer: Tokenizer) -> None:
    """Only the first choice of a prompt is asked for its log-probabilities; all show them."""
    served.gateway.script = lambda request: Script(
        tokenizer.encode_now(ANSWER if request.sampling.child else " first")
    )
    found = both(client, prompt=[PROMPT, OTHER], n=2, echo=True, logprobs=1)
    texts = [choice["text"] for choice in found["choices"]]
    assert texts == [PROMPT + " first", PROMPT + ANSWER, OTHER + " first", OTHER + ANSWER]
    asked = [request.sampling.prompt_logprobs for request in served.gateway.requests[:4]]
    assert asked == [1, None, 1, None]
    for index, prompt in enumerate((PROMPT, PROMPT, OTHER, OTHER)):
        ids = tokenizer.encode_now(prompt)
        said = found["choices"][index]["logprobs"]["token_logprobs"][: len(ids)]
        assert said == [None, *(one.chosen for one in prompt_scores(ids, 1))]
    assert found["usage"]["prompt_tokens"] == sum(len(tokenizer.encode_now(p)) for p in (PROMPT, OTHER))


def counted(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"kvferry_{name}{{"))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_the_prompt_alone(
    served: Served, client: httpx.Client, tokenizer: Tokenizer, logprobs: int | None, n: int
) -> None:
    """BR-093."""
    served.gateway.answers(tokenizer.end_ids[0], finish="stop")
    prompt_tokens = counted(client, "prompt_tokens_total")
    generated = counted(client, "generation_tokens_total")
    found = both(client, prompt=PROMPT, max_tokens=0, echo=True, logprobs=logprobs, n=n)
    ids = tokenizer.encode_now(PROMPT)
    assert [(c["text"], c["finish_reason"]) for c in found["choices"]] == [(PROMPT, "length")] * n
    assert found["usage"]["completion_tokens"] == 0
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] == len(ids)
    assert counted(client, "generation_tokens_total") == generated
    if logprobs is None:
        assert served.gateway.requests == [], "no worker knows more than we"
        return
    assert len(found["choices"][-1]["logprobs"]["tokens"]) == len(ids)
    assert served.gateway.requests[0].sampling.max_tokens == 1
    assert counted(client, "prompt_tokens_total") == prompt_tokens + 2 * len(ids), "asked for twice"


def test_a_prompt_alone_may_fill_the_context(served: Served, client: httpx.Client) -> None:
    """Only where a worker is asked must there be place for the token that it cannot but compute."""
    served.gateway.context = 40
    ask = TEXT | {"prompt": [5] * 40, "echo": True, "max_tokens": 0}
    assert client.post("/v1/completions", json=ask).status_code == 200
    assert client.post("/v1/completions", json=ask | {"prompt": [5] * 41}).status_code == 400
    scored = client.post("/v1/completions", json=ask | {"logprobs": 0})
    assert scored.status_code == 400
    message = scored.json()["error"]["message"]
    assert "log-probabilities" in message and "at most 39" in message
    for fields in ({"echo": False, "max_tokens": 1}, {"max_tokens": 1}, {"max_tokens": None}):
        assert client.post("/v1/completions", json=ask | fields).status_code == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False, "logprobs": 1}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"echo": 1}, "echo"),
    ],
)
def test_what_makes_no_sense_is_a_400(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/completions", json=TEXT | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_more_than_an_answer_can_hold_is_a_400(
    served: Served, client: httpx.Client, tokenizer: Tokenizer
) -> None:
    """128 times a long prompt with twenty alternatives to each token would be hundreds of megabytes."""
    served.gateway.answers(5)
    ask = TEXT | {"prompt": [5] * 2000, "echo": True, "max_tokens": 0, "n": 7}
    refused = client.post("/v1/completions", json=ask | {"logprobs": 20})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs"), refused.text
    assert served.gateway.requests == []
    taken = client.post("/v1/completions", json=ask | {"logprobs": 17})
    assert taken.status_code == 200
    assert client.post("/v1/completions", json=ask).status_code == 200, "text alone is not much"


@pytest.mark.parametrize("as_ids", [True, False])
def test_text_to_echo_is_bounded_too(
    served: Served, client: httpx.Client, tokenizer: Tokenizer, as_ids: bool
) -> None:
    served.gateway.answers(5)
    longest = max(range(tokenizer.vocab_size), key=lambda id: len(tokenizer.token_bytes(id)))
    ids = [longest] * 4000
    text = b"".join(map(tokenizer.token_bytes, ids)).decode()
    fits = MAX_ECHOED_BYTES // len(text.encode())
    ask = TEXT | {"prompt": ids if as_ids else text, "echo": True, "max_tokens": 1}
    refused = client.post("/v1/completions", json=ask | {"n": fits + 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo"), refused.text
    assert str(MAX_ECHOED_BYTES) in refused.json()["error"]["message"]
    assert served.gateway.requests == []
    taken = client.post("/v1/completions", json=ask | {"n": fits, "stream": True})
    assert taken.status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_no_write_of_a_stream_is_large_and_no_large_answer_is_made_on_the_loop(
    served: Served,
    client: httpx.Client,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    served.gateway.answers(5)
    writes: list[int] = []
    threads: list[bool] = []
    body, whole = ResponseWriter._body, shapes._response

    async def counted_body(self: ResponseWriter, data: bytes, more: bool) -> None:
        writes.append(len(data))
        await body(self, data, more)

    def watched(*args: Any) -> bytes:
        try:
            threads.append(asyncio.get_running_loop() is None)
        except RuntimeError:
            threads.append(True)
        return whole(*args)

    monkeypatch.setattr(ResponseWriter, "_body", counted_body)
    monkeypatch.setattr(shapes, "_response", watched)
    ask = TEXT | {"prompt": "word " * 8000, "echo": True, "max_tokens": 1, "n": 20, "stream": stream}
    assert client.post("/v1/completions", json=ask).status_code == 200
    assert sum(writes) > 800_000
    if stream:
        assert max(writes) < 100_000
    else:
        assert threads == [True]


def test_stop_strings_are_not_looked_for_in_the_prompt(
    served: Served, client: httpx.Client, tokenizer: Tokenizer
) -> None:
    served.gateway.answers(*tokenizer.encode_now(" a b STOP c"))
    found = both(client, prompt="Do not STOP here", stop="STOP", echo=True, logprobs=0)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Do not STOP here a b ", "stop")
    said = choice["logprobs"]
    assert "".join(said["tokens"]).startswith(choice["text"])
    assert all(offset < len(choice["text"]) for offset in said["text_offset"])


def test_a_long_prompt_comes_in_pieces(served: Served, client: httpx.Client, tokenizer: Tokenizer) -> None:
    text = " ".join(str(number) for number in range(500)) + " 😀" * 100
    ids = tokenizer.encode_now(text)
    served.gateway.answers(*tokenizer.encode_now(ANSWER))
    found = both(client, prompt=text, echo=True, logprobs=0)
    assert found["choices"][0]["text"] == text + ANSWER
    chunks = events(
        client.post(
            "/v1/completions", json=TEXT | {"prompt": text, "echo": True, "logprobs": 0, "stream": True}
        )
    )
    sizes = [len(c["choices"][0]["logprobs"]["tokens"]) for c in chunks if c["choices"][0]["logprobs"]]
    assert max(sizes) == PIECE_TOKENS and sum(sizes) == len(ids) + len(tokenizer.encode_now(ANSWER))


# ---------------------------------------------------------------- the pure parts


def table(**names: bytes) -> Any:
    return lambda id: list(names.values())[id]


def test_offsets_where_the_tokenizer_puts_something_before_the_text() -> None:
    """A beginning token and a space that the text does not have, as SentencePiece models do."""
    pieces = table(bos=b"<s>", hello=b" Hello", world=b" world")
    shown = echoed_prompt([0, 1, 2], "Hello world", pieces)
    assert (shown.text, shown.offsets) == ("Hello world", [0, 0, 5])
    assert echoed_prompt([0, 1, 2], None, pieces).text == "<s> Hello world"
    changed = echoed_prompt([1, 2], "He", pieces)
    assert (changed.text, changed.offsets) == ("He", [0, 2]), "never beyond the text"


def test_offsets_of_a_character_in_parts_and_one_cut_off() -> None:
    pieces = table(a=b"a", one=b"\xf0\x9f", two=b"\x98\x80", b=b"b")
    assert echoed_prompt([0, 1, 2, 3], "a😀b", pieces).offsets == [0, 1, 1, 2]
    cut = echoed_prompt([0, 1], None, pieces)
    assert (cut.text, cut.offsets) == ("a\ufffd", [0, 1])


def echo_of(lengths: Sequence[int], leaders: Sequence[int], scored: bool) -> Echo:
    prompts = [echoed_prompt(list(range(length)), None, lambda _: b"x") for length in lengths]
    return Echo(prompts, leaders, scored)


def test_a_choice_waits_for_its_own_prompt_only() -> None:
    echo = echo_of([3, 3, 1, 4], [0, 2, 3], scored=True)
    assert [(choice, piece.text) for choice, piece in echo.begin()] == [(2, "x")]
    score = (TokenLogprobs(-1.0),)

    def push(choice: int, scores: int = 0, word: str = "") -> list[tuple[int, str]]:
        delta = TokenDelta((), None, None, 0, choice, score * scores)
        return [(at, piece.text) for at, piece in echo.push(delta, [Piece(word)] if word else [])]

    assert push(1, word="early") == [] and push(0, 1) == []
    assert push(2, word="free") == [(2, "free")] and push(3, 2) == []
    assert push(0, 1) == [(0, "xxx"), (1, "xxx"), (1, "early")]
    assert push(1, word="late") == [(1, "late")]
    assert push(3, 1, "same") == [(3, "xxxx"), (3, "same")]


@pytest.mark.parametrize("length", [0, 1, PART_ITEMS, PART_ITEMS + 1, 3 * PART_ITEMS])
def test_an_answer_written_in_parts_is_the_same_text(length: int) -> None:
    scored: list[Any] = [{"a\n": -0.1}, None, "é", [1, []]]
    value = {
        "n": None,
        "list": [scored[at % 4] for at in range(length)],
        "in": {"é": [{"x": [True] * length}]},
    }
    assert _in_parts(value) == _dumps(value)
