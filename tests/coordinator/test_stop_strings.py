from __future__ import annotations

from hypothesis import given, strategies as st

from coordinator.stop_strings import StopStrings

SHORT = st.text("ab", min_size=1, max_size=5)


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(end, length) by trying every place."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end, max(lengths)
    return None


def could_begin(text: str, stops: list[str]) -> int:
    ends = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max(ends, default=0)


@given(st.lists(st.text("ab", max_size=4), max_size=6), st.lists(SHORT, min_size=1, max_size=3))
def test_finds_the_first_match_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    search = StopStrings(stops)
    text = "".join(pieces)
    expected = first_match(text, stops)
    read = 0
    for piece in pieces:
        match = search.feed(piece, armed=True)
        if match is not None:
            assert (read + match[0], match[1]) == expected
            return
        read += len(piece)
        assert search.held_chars == could_begin(text[:read], stops)
    assert expected is None


def test_what_was_complete_before_it_counted_stays_text() -> None:
    search = StopStrings(["aa", "aab"])
    assert search.feed("xaa", armed=False) is None
    assert search.feed("c", armed=True) is None
    assert search.feed("aa", armed=True) == (2, 2)


def test_a_match_may_begin_inside_one_that_did_not_count() -> None:
    search = StopStrings(["aba"])
    assert search.feed("aba", armed=False) is None
    assert search.held_chars == 1
    assert search.feed("ba", armed=True) == (2, 3)


def test_no_text_and_no_state() -> None:
    search = StopStrings(["ab"])
    assert search.feed("", armed=True) is None
    assert search.held_chars == 0
