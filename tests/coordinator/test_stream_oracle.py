"""Thousands of answers, whole and streamed, against a plain account of what each must say.

The account (`Said`) knows no incremental decoder and no automaton: it decodes all bytes so far after every token
and looks for the stops with `endswith`. What it says is compared with the app's answer through the whole
HTTP front but for the sockets: text, the exact pieces it was streamed in, usage, reason, log-probabilities.
"""

from __future__ import annotations

import asyncio
import codecs
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.request import Request
from coordinator.door.front_door import ASGIApp
from coordinator.http_api import create_app
from coordinator.tokenizer import Tokenizer
from tests.coordinator.in_process import Reply, post
from tests.coordinator.scripted_gateway import Script, ScriptedGateway

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
END = 2
TEXTS = (
    "Paris is 😀 nice, isn't it?",
    "你好，世界！ 123",
    "👩‍👩‍👧‍👦x🏳️‍🌈",
    "a\n\nb\nabab ab",
    "naïve café — ½ €5",
    "</think>9.9 and 9.8",
)
# Beginnings of characters that never end, bytes that begin none, and what looks like them.
JUNK = (b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xe4", b"\xbd", b"\xc3", b"a", b" the", b"\n", b"\xa0\xe5")


@dataclass(frozen=True, slots=True)
class Case:
    """Ids that the cluster says, how it ends, and what is asked."""

    ids: tuple[int, ...]
    finish: str
    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    group: int = 1


@dataclass(slots=True)
class Said:
    """What an answer must be: `pieces` in the order in which they may be shown, and whose `scored` tokens."""

    pieces: list[str] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    finish: str = ""
    scored: list[tuple[int, int]] = field(default_factory=list)  # (id, offset in characters)


def said(case: Case, tokenizer: Tokenizer) -> Said:
    end_ids = {*case.stop_token_ids} | (set() if case.ignore_eos else {END})
    ended = case.finish == "stop" and case.ids[-1] in end_ids
    shown = case.ids[:-1] if ended else case.ids
    found = Said(tokens=len(case.ids), finish=case.finish)
    raw, before = b"", ""
    offsets: list[tuple[int, int]] = []
    for count, id in enumerate(shown, 1):
        raw += tokenizer.text_bytes(id)
        text = codecs.utf_8_decode(raw, "replace", False)[0]
        offsets.append((id, len(before)))
        begin = _stop(text, len(before), case.stops) if count >= case.min_tokens else None
        if begin is not None:
            found.pieces.append(text[len("".join(found.pieces)) : begin])
            found.tokens, found.finish = count, "stop"
            found.scored = [entry for entry in offsets if entry[1] < begin]
            break
        safe = len(text) - _could_begin(text, case.stops)
        found.pieces.append(text[len("".join(found.pieces)) : safe])
        before = text
    else:
        text = raw.decode("utf-8", "replace")
        found.pieces.append(text[len("".join(found.pieces)) :])
        found.scored = offsets
    found.text = "".join(found.pieces)
    found.pieces = [piece for piece in found.pieces if piece]
    return found


def _stop(text: str, seen: int, stops: Sequence[str]) -> int | None:
    """Where the first stop that is complete after `seen` characters begins."""
    for end in range(seen + 1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths)
    return None


def _could_begin(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of the text that a stop may begin with."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


# ---------------------------------------------------------------- the app's answer


class Asked:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.gateway = ScriptedGateway()
        self.tokenizer = tokenizer
        self.app: ASGIApp = create_app(self.gateway, tokenizer, self.gateway.metrics, served_models=("smol",))

    async def check(self, case: Case, path: str) -> None:
        await self.check_choices([case], path, {})

    async def check_choices(self, cases: Sequence[Case], path: str, asked: dict[str, Any]) -> None:
        """Streamed, whole, and as the account has it. The cases differ in what the cluster says, and `asked`
        makes as many choices as there are cases."""
        self._script(cases)
        body = _body(cases[0], path) | asked
        whole = (await post(self.app, path, body)).json()
        streamed, _ = _gathered(await post(self.app, path, body | {"stream": True}), path, False)
        counting = body | {"stream": True, "stream_options": {"include_usage": True}}
        assert _gathered(await post(self.app, path, counting), path, True) == (streamed, whole["usage"]), (
            cases
        )
        assert [choice["index"] for choice in whole["choices"]] == [*range(len(cases))]
        tokens = 0
        for case, choice, stream in zip(cases, whole["choices"], streamed, strict=True):
            expected = said(case, self.tokenizer)
            if asked.get("echo"):
                prompt = asked["prompt"][choice["index"] // asked["n"]]
                expected.pieces.insert(0, prompt)
                expected.text = prompt + expected.text
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert text == expected.text, case
            assert stream.pieces == expected.pieces, case
            assert stream.logprobs == _joined([choice["logprobs"]]), case
            assert stream.finish == choice["finish_reason"] == expected.finish, case
            self._check_logprobs(choice["logprobs"], expected, case, path)
            tokens += expected.tokens
        assert whole["usage"]["completion_tokens"] == tokens, cases

    def _script(self, cases: Sequence[Case]) -> None:
        """The cases in the order in which their requests are submitted."""
        turn = itertools.cycle(cases)

        def script(_: Request) -> Script:
            case = next(turn)
            return Script(list(case.ids), case.finish, case.group)  # type: ignore[arg-type]

        self.gateway.script = script

    def _check_logprobs(self, found: dict[str, Any] | None, expected: Said, case: Case, path: str) -> None:
        if case.logprobs is None:
            assert found is None
            return
        assert found is not None
        raws = [self.tokenizer.token_bytes(id) for id, _ in expected.scored]
        if path == CHAT:
            assert [bytes(entry["bytes"]) for entry in found["content"]] == raws, case
            assert all(len(entry["top_logprobs"]) == case.logprobs for entry in found["content"])
        else:
            assert found["text_offset"] == [offset for _, offset in expected.scored], case
            assert len(found["tokens"]) == len(found["token_logprobs"]) == len(raws), case
            assert all(name in top for name, top in zip(found["tokens"], found["top_logprobs"], strict=True))


def _body(case: Case, path: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "smol", "max_tokens": 200, "stop": list(case.stops)}
    body |= {"min_tokens": case.min_tokens, "ignore_eos": case.ignore_eos}
    body |= {"stop_token_ids": list(case.stop_token_ids)}
    if path == TEXT:
        return body | {"prompt": "hi", "logprobs": case.logprobs}
    if case.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": case.logprobs}
    return body | {"messages": [{"role": "user", "content": "hi"}]}


@dataclass(slots=True)
class Streamed:
    """One choice out of its chunks."""

    pieces: list[str]
    logprobs: dict[str, Any] | None
    finish: str | None


def _gathered(reply: Reply, path: str, counted: bool) -> tuple[list[Streamed], dict[str, Any] | None]:
    """The choices of a stream in order, and usage. Every chunk is held to its form."""
    chunks = reply.events()
    usage = None
    if counted:
        last = chunks.pop()
        assert last["choices"] == []
        usage = last["usage"]
    assert all(("usage" in chunk) == counted and chunk.get("usage") is None for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    of: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        of.setdefault(chunk["choices"][0]["index"], []).append(chunk["choices"][0])
    assert sorted(of) == [*range(len(of))]
    return [_choice(of[index], path) for index in sorted(of)], usage


def _choice(choices: list[dict[str, Any]], path: str) -> Streamed:
    if path == CHAT:
        first = choices.pop(0)
        assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
    *texts, end = choices
    pieces = [choice["delta"]["content"] if path == CHAT else choice["text"] for choice in texts]
    assert all(pieces), "a chunk without text"
    assert all(choice["finish_reason"] is None for choice in texts)
    assert end["delta"] == {} if path == CHAT else end["text"] == ""
    return Streamed(pieces, _joined([choice["logprobs"] for choice in choices]), end["finish_reason"])


def _joined(parts: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Log-probabilities of chunks as those of one answer; None where there is not one entry."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in (part or {}).items():
            whole[name] = value if not isinstance(value, list) else whole.get(name, []) + value
    return whole if any(whole.values()) else None


# ---------------------------------------------------------------- the grid


class Cutter:
    """Cuts bytes into tokens of the vocabulary where it likes, not where the tokenizer would."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids: dict[bytes, int] = {}
        for id in range(tokenizer.vocab_size):
            if raw := tokenizer.text_bytes(id):
                self._ids.setdefault(raw, id)

    def parts(self, raw: bytes, chance: random.Random, longest: int = 4) -> tuple[int, ...]:
        ids = []
        while raw:
            sizes = [size for size in range(1, min(longest, len(raw)) + 1) if raw[:size] in self._ids]
            size = chance.choice(sizes)
            ids.append(self._ids[raw[:size]])
            raw = raw[size:]
        return tuple(ids)

    def every_way(self, raw: bytes) -> Iterator[tuple[int, ...]]:
        if not raw:
            yield ()
        for size in range(1, len(raw) + 1):
            if raw[:size] in self._ids:
                for rest in self.every_way(raw[size:]):
                    yield (self._ids[raw[:size]], *rest)


@pytest.fixture(scope="module")
def asked(tokenizer: Tokenizer) -> Asked:
    return Asked(tokenizer)


@pytest.fixture(scope="module")
def cutter(tokenizer: Tokenizer) -> Cutter:
    return Cutter(tokenizer)


def check_all(asked: Asked, cases: Sequence[Case]) -> None:
    async def check() -> None:
        for index, case in enumerate(cases):
            await asked.check(case, (CHAT, TEXT)[index % 2])

    asyncio.run(check())


def test_a_stop_at_every_place_of_every_text(asked: Asked, cutter: Cutter) -> None:
    """Every part of up to four characters as the stop, in a text cut into tokens anew each time."""
    chance = random.Random(1)
    cases = []
    for text in TEXTS:
        for size, begin in itertools.product(range(1, 5), range(len(text))):
            stop = text[begin : begin + size]
            cases.append(
                Case(
                    cutter.parts(text.encode(), chance),
                    "length",
                    (
                        stop,
                        *chance.choice(
                            [(), (stop + "zz",), (stop[1:] or stop,), (text[begin : begin + 2], "q")]
                        ),
                    ),
                    min_tokens=chance.choice((0, 0, 0, 2, 9)),
                    logprobs=chance.choice((None, 0, 5)),
                    group=chance.choice((1, 2, 100)),
                )
            )
    check_all(asked, cases)


def test_a_character_in_every_way_it_splits_and_cut_anywhere(asked: Asked, cutter: Cutter) -> None:
    cases = []
    for character in ("😀", "好", "é", "a😀b"):
        for ids in cutter.every_way(character.encode()):
            for kept in range(1, len(ids) + 1):
                for logprobs, group in ((None, 1), (0, 1), (20, 3)):
                    cases.append(Case(ids[:kept], "length", logprobs=logprobs, group=group))
    assert any(len(case.ids) == 4 for case in cases)
    check_all(asked, cases)
    assert asked.gateway.deltas_relayed > 20, "the short way was not gone"


def test_any_settings_together(asked: Asked, cutter: Cutter) -> None:
    """Drawn from all of it at once: texts cut anyhow, junk, every way of ending."""
    chance = random.Random(2)
    (comma,) = cutter.parts(b",", chance)
    cases = []
    for _ in range(500):
        raw = "".join(chance.choices(TEXTS, k=chance.choice((0, 1, 2)))).encode()
        ids = cutter.parts(raw[: chance.randrange(40)] if chance.random() < 0.5 else raw[:60], chance)
        junk = b"".join(chance.choices(JUNK, k=chance.randrange(6)))
        ids = (*cutter.parts(junk, chance, 2), *ids) if chance.random() < 0.4 else ids
        finish, stop_ids, ignore = chance.choice(
            [("length", (), False), ("length", (), True), ("stop", (), False), ("stop", (comma,), False)]
        )
        if finish == "stop":
            ids = (*ids, comma if stop_ids and chance.random() < 0.5 else END)
        elif ignore and chance.random() < 0.5:
            ids = (*ids, END, *ids[:3])
        cases.append(
            Case(
                ids or (comma,),
                finish if ids else "length",
                tuple(
                    chance.sample(
                        ["is", "😀", "\n", "ab", "aba", "世", "\ufffd", "n't i", "9.8", "e", "ff"], 3
                    )
                )
                if chance.random() < 0.7
                else (),
                min_tokens=chance.choice((0, 0, 1, 5, 50)),
                ignore_eos=ignore,
                stop_token_ids=stop_ids,
                logprobs=chance.choice((None, None, 0, 5, 20)),
                group=chance.choice((1, 1, 2, 7, 100)),
            )
        )
    check_all(asked, cases)


def test_choices_side_by_side(asked: Asked, cutter: Cutter) -> None:
    """Several answers to one prompt and to several, some after their prompt: each as if alone, usage of them all."""
    chance = random.Random(3)

    async def check() -> None:
        for turn in range(60):
            path = (CHAT, TEXT)[turn % 2]
            prompts, n = (1, 3) if path == CHAT else chance.choice([(1, 2), (2, 1), (3, 2)])
            fields: dict[str, Any] = {
                "stops": chance.choice([(), ("is",), ("😀", "ab")]),
                "logprobs": chance.choice((None, 0, 5)),
                "group": chance.choice((1, 3)),
            }
            cases = []
            for _ in range(prompts * n):
                ids = cutter.parts(chance.choice(TEXTS).encode(), chance)[: chance.randrange(1, 20)]
                cases.append(Case(ids, "length", **fields))
            asks: dict[str, Any] = {"n": n}
            if path == TEXT:
                asks["prompt"] = ["hi", "ho", "hu"][:prompts]
                # Scored prompts are in `test_echo`, which has their log-probabilities.
                asks["echo"] = fields["logprobs"] is None
            await asked.check_choices(cases, path, asks)

    asyncio.run(check())
