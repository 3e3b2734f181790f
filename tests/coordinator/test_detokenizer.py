from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from coordinator.detokenizer import Detokenizer
from coordinator.tokenizer import Tokenizer

IDS = st.lists(st.integers(0, 49151), max_size=60)


@pytest.fixture(scope="module")
def known_bytes(tokenizer: Tokenizer) -> frozenset[bytes]:
    return frozenset(tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size))


def whole(detokenizer: Detokenizer, ids: list[int]) -> tuple[list[str], int]:
    """The pieces of an answer, and how many tokens it took."""
    pieces = []
    for count, id in enumerate(ids, 1):
        pieces.append(detokenizer.push(id))
        if detokenizer.stopped:
            return pieces, count
    return [*pieces, detokenizer.finish()], len(ids)


@settings(max_examples=300, deadline=None)
@given(ids=IDS)
def test_the_text_is_that_of_the_library(tokenizer: Tokenizer, ids: list[int]) -> None:
    pieces, _ = whole(Detokenizer(tokenizer.text_bytes), ids)
    assert "".join(pieces) == tokenizer._encoder.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_text_survives_both_ways(tokenizer: Tokenizer, known_bytes: frozenset[bytes], text: str) -> None:
    """But for a few control characters and private planes: this model's vocabulary lacks their bytes."""
    text = "".join(char for char in text if all(bytes([byte]) in known_bytes for byte in char.encode()))
    pieces, _ = whole(Detokenizer(tokenizer.text_bytes), tokenizer.encode_now(text))
    assert "".join(pieces) == text or "<|" in text
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


def test_BR_081_ten_thousand_random_answers_never_raise(tokenizer: Tokenizer) -> None:
    chance = random.Random(0)
    partial = [id for id in range(49152) if b"\xf0" in tokenizer.token_bytes(id) or id < 600]
    for _ in range(10_000):
        ids = [chance.choice(partial) for _ in range(chance.randrange(8))]
        pieces, _ = whole(Detokenizer(tokenizer.text_bytes, ["ab", "\ufffd!"]), ids)
        "".join(pieces).encode()


BYTES = {id: bytes([id]) for id in range(256)}


def bytewise(text: str) -> list[int]:
    return list(text.encode())


def of_bytes(stops: list[str] | None = None, min_tokens: int = 0) -> Detokenizer:
    return Detokenizer(lambda id: BYTES.get(id, b""), stops or [], min_tokens)


@pytest.mark.parametrize("text", ["😀", "é", "你好", "👩‍👩‍👧‍👦", "🏳️‍🌈"])
def test_a_character_is_never_split(text: str) -> None:
    pieces, _ = whole(of_bytes(), bytewise(text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_cut_character_becomes_one_replacement_at_the_end(kept: int) -> None:
    pieces, _ = whole(of_bytes(), bytewise("a😀")[: 1 + kept])
    assert pieces == ["a", *[""] * kept, "\ufffd"]


def test_broken_bytes_do_not_stop_what_follows() -> None:
    pieces, _ = whole(of_bytes(), [0xF0, 0x9F, ord("a"), 0xFF, 0x80, ord("b")])
    assert "".join(pieces) == "\ufffda\ufffd\ufffdb"


@pytest.mark.parametrize("stop", ["DEFGHIJ", "D", "EF", "J", "é😀", "\n"])
def test_a_stop_at_every_alignment_to_token_borders(stop: str) -> None:
    text = f"ABC {stop} tail"
    raw = text.encode()
    for first in range(len(raw) + 1):
        for second in range(first, len(raw) + 1):
            parts = [raw[:first], raw[first:second], raw[second:]]
            detokenizer = Detokenizer(lambda id, parts=parts: parts[id], [stop])  # type: ignore[misc]
            pieces, _ = whole(detokenizer, [0, 1, 2])
            assert "".join(pieces) == text[: text.index(stop)]
            assert detokenizer.stopped


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    text=st.text("ab😀", max_size=14),
    stops=st.lists(st.text("ab😀", min_size=1, max_size=4), max_size=3),
)
def test_how_text_is_cut_into_tokens_changes_nothing(
    data: st.DataObject, text: str, stops: list[str]
) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    pieces, _ = whole(Detokenizer(lambda id: parts[id], stops), list(range(len(parts))))
    singly, _ = whole(of_bytes(stops), bytewise(text))
    assert "".join(pieces) == "".join(singly)
    shown = ""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    allowed = text if not ends else text[: min(ends)]
    for piece in pieces:
        shown += piece
        assert allowed.startswith(shown)


def test_a_match_that_fails_is_shown() -> None:
    pieces, _ = whole(of_bytes(["abcd"]), bytewise("abcabx"))
    assert pieces == ["", "", "", "abc", "", "abx", ""]


def test_held_text_is_shown_at_the_end() -> None:
    pieces, _ = whole(of_bytes(["abcd"]), bytewise("xabc"))
    assert pieces == ["x", "", "", "", "abc"]


def test_the_first_token_may_be_the_stop() -> None:
    detokenizer = of_bytes(["\n"])
    assert detokenizer.push(10) == ""
    assert detokenizer.stopped
    assert detokenizer.released_chars == 0


def test_stops_one_inside_the_other() -> None:
    assert "".join(whole(of_bytes(["ab", "abc"]), bytewise("xabcy"))[0]) == "x"
    assert "".join(whole(of_bytes(["bc", "abcd"]), bytewise("xabcdy"))[0]) == "xa"
    assert "".join(whole(of_bytes(["c", "abc"]), bytewise("xabcy"))[0]) == "x"


def test_stops_before_min_tokens_are_text() -> None:
    pieces, count = whole(of_bytes(["\n"], min_tokens=4), bytewise("a\nb\nc\n"))
    assert ("".join(pieces), count) == ("a\nb", 4)
    pieces, count = whole(of_bytes(["bc"], min_tokens=4), bytewise("abcbcd"))
    assert ("".join(pieces), count) == ("abc", 5)


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    ids = [1, *tokenizer.encode_now("hi"), 2, *tokenizer.encode_now(" there"), 0]
    assert "".join(whole(Detokenizer(tokenizer.text_bytes), ids)[0]) == "hi there"
