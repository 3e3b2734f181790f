from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from common.errors import RequestFailed
from common.request import SamplingParams, TokenLogprobs
from coordinator.answer import LOGPROB_FLOOR, Answer, Piece
from coordinator.gateway import TokenDelta

END = 300
BYTES = {id: bytes([id]) for id in range(256)} | {257: b"bc", 258: b"", 259: b"b\xf0", 260: b"\x9f\x98\x80a"}


def text_bytes(id: int) -> bytes:
    return BYTES.get(id, b"")


def answer_of(logprobs: int | None = None, stops: tuple[str, ...] = (), min_tokens: int = 0) -> Answer:
    sampling = SamplingParams(
        max_tokens=100, end_token_ids=(END, 97), logprobs=logprobs, min_tokens=min_tokens
    )
    return Answer(text_bytes, sampling, stops)


def deltas(ids: list[int], finish: str, groups: list[int], scored: bool) -> list[TokenDelta]:
    """The ids cut into groups; the last delta has the reason."""
    cuts = sorted({0, len(ids), *(cut for cut in groups if cut < len(ids))})
    parts = [tuple(ids[a:b]) for a, b in itertools.pairwise(cuts)] or [()]
    return [
        TokenDelta(
            part,
            tuple(TokenLogprobs(-float(id)) for id in part) if scored else None,
            finish if index == len(parts) - 1 else None,  # type: ignore[arg-type]
            3,
        )
        for index, part in enumerate(parts)
    ]


def run(answer: Answer, parts: list[TokenDelta]) -> list[Piece]:
    pieces: list[Piece] = []
    for part in parts:
        pieces += answer.push(part)
        if answer.finish is not None:
            break
    return pieces


def text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def chars(string: str) -> list[int]:
    return list(string.encode())


def test_one_piece_for_each_token_that_has_text() -> None:
    pieces = run(answer_of(), deltas(chars("ab😀"), "length", [], False))
    assert pieces == [Piece("a"), Piece("b"), Piece("😀"), Piece("", finish="length")]


def test_the_end_token_is_billed_and_not_shown() -> None:
    answer = answer_of(logprobs=0)
    pieces = run(answer, deltas([*chars("x"), 97], "stop", [1], True))
    assert text(pieces) == "x"
    assert [token.id for piece in pieces for token in piece.tokens] == chars("x")
    assert (answer.completion_tokens, answer.finish, answer.cached_tokens) == (2, "stop", 3)


def test_an_end_token_at_max_tokens_is_a_stop_and_an_ignored_one_is_text() -> None:
    assert run(answer_of(), deltas([END], "stop", [], False))[-1].finish == "stop"
    answer = answer_of()
    assert text(run(answer, deltas([97, 98], "length", [], False))) == "ab"
    assert answer.completion_tokens == 2


def test_tokens_past_a_stop_are_not_billed() -> None:
    answer = answer_of(stops=("bc",))
    pieces = run(answer, deltas(chars("abcdef"), "length", [], False))
    assert text(pieces) == "a"
    assert (answer.completion_tokens, answer.finish) == (3, "stop")


def test_a_stop_completed_by_the_last_token_is_a_stop() -> None:
    answer = answer_of(stops=("bc",))
    run(answer, deltas(chars("abc"), "length", [], False))
    assert answer.finish == "stop"


def test_a_stop_as_the_first_token_with_logprobs() -> None:
    answer = answer_of(logprobs=5, stops=("\n",))
    pieces = run(answer, deltas(chars("\nabc"), "length", [], True))
    assert pieces == [Piece("", (), "stop")]
    assert answer.completion_tokens == 1


def test_entries_of_a_split_character() -> None:
    """A token comes with the last text that began in it; one without any waits for the character it is part of."""
    pieces = run(answer_of(logprobs=0), deltas([259, 260], "length", [], True))
    assert [(piece.text, [token.id for token in piece.tokens]) for piece in pieces] == [
        ("b", [259]),
        ("😀a", [260]),
        ("", []),
    ]
    parts = run(answer_of(logprobs=0), deltas(chars("😀"), "length", [1, 2, 3], True))
    assert [(piece.text, len(piece.tokens)) for piece in parts] == [("😀", 4), ("", 0)]


def test_entries_stop_where_the_text_does() -> None:
    pieces = run(answer_of(logprobs=0, stops=("cd",)), deltas([97, 257, 100, 101], "length", [], True))
    assert text(pieces) == "ab"
    assert [(token.id, token.offset) for piece in pieces for token in piece.tokens] == [(97, 0), (257, 1)]


def test_a_token_without_text_beside_a_stop_is_not_part_of_the_answer() -> None:
    pieces = run(answer_of(logprobs=0, stops=("cd",)), deltas([99, 258, 99, 100], "length", [1, 2, 3], True))
    assert text(pieces) == "c"
    assert [(token.id, token.offset) for piece in pieces for token in piece.tokens] == [(99, 0)]


def test_minus_infinity_becomes_a_floor() -> None:
    infinite = TokenLogprobs(float("-inf"), ((5, float("-inf")), (6, -1.0)))
    pieces = answer_of(logprobs=2).push(TokenDelta((98,), (infinite,), None, 0))
    assert pieces[0].tokens[0].logprobs == TokenLogprobs(LOGPROB_FLOOR, ((5, LOGPROB_FLOOR), (6, -1.0)))


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_an_early_end_is_a_failure(finish: str) -> None:
    with pytest.raises(RequestFailed, match=finish):
        answer_of().push(TokenDelta((), None, finish, 0))  # type: ignore[arg-type]


IDS = st.lists(st.sampled_from([97, 98, 99, 100, 257, 258, 259, 260, 0xF0, 0x9F]), max_size=12)


@settings(max_examples=400, deadline=None)
@given(
    ids=IDS,
    groups=st.lists(st.integers(1, 12), max_size=5),
    stops=st.lists(st.sampled_from(["ab", "bc", "😀", "bca", "\ufffd", "d"]), max_size=2),
    scored=st.booleans(),
    min_tokens=st.integers(0, 5),
)
def test_grouping_changes_nothing(
    ids: list[int], groups: list[int], stops: list[str], scored: bool, min_tokens: int
) -> None:
    """Streamed is whole: text, entries, usage and reason."""
    logprobs = 0 if scored else None
    one, many = (answer_of(logprobs, tuple(stops), min_tokens) for _ in range(2))
    whole = run(one, deltas(ids, "length", [], scored))
    parted = run(many, deltas(ids, "length", groups, scored))
    assert whole == parted
    assert (one.completion_tokens, one.finish) == (many.completion_tokens, many.finish)
    entries = [token for piece in whole for token in piece.tokens]
    assert [token.id for token in entries] == ids[: len(entries)]
    assert all(piece.text for piece in whole[:-1])
    assert not whole[-1].text
    if scored and one.finish == "length":
        assert len(entries) == len(ids)
