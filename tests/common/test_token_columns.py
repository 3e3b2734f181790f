"""Rows of tokens as columns: all that a row may say comes back, and columns that do not fit each other are refused."""

from __future__ import annotations

from typing import Any

import pytest

from common.messages import Sender, TokenRow, Tokens
from common.request import Attempt, Incarnation, RequestId, TokenLogprobs, pack_ids
from common.token_columns import columns_of, rows_of
from common.wire import encode

ONE, TWO = RequestId("one"), RequestId("two")
PLAIN = (TokenRow(ONE, Attempt(1 << 62), 7, (11,)), TokenRow(TWO, Attempt(3), 0, (0,)))
SAID = (TokenLogprobs(-0.5, ((4, -0.5), (5, -2.0))),)


@pytest.mark.parametrize(
    "rows",
    [
        (),
        PLAIN,
        (TokenRow(ONE, Attempt(1), 2, ()),),
        (TokenRow(ONE, Attempt(1), 2, (4, 5, 6)), *PLAIN, TokenRow(ONE, Attempt(1), 2, (), None, "stop")),
        (*PLAIN, TokenRow(ONE, Attempt(1), 0, (4,), SAID, "length", 16)),
        (TokenRow(ONE, Attempt(1), 0, (4,), None, None, 0), TokenRow(TWO, Attempt(1), 0, (), ())),
    ],
)
def test_rows_come_back_as_they_were(rows: tuple[TokenRow, ...]) -> None:
    assert rows_of(columns_of(rows)) == rows


def test_a_row_of_one_token_takes_few_bytes() -> None:
    """What a step of a large batch sends: id, attempt, index and token, no names."""
    rows = tuple(TokenRow(RequestId(f"cmpl-{i:032x}"), Attempt(1 << 60), 9, (i,)) for i in range(256))
    assert len(encode(Tokens(1, rows), Sender("decode-0", Incarnation(1)))) < 256 * 60 + 200


@pytest.mark.parametrize(
    "change",
    [
        {"ids": ["one"]},
        {"ids": ["one", 2]},
        {"ids": ["one", "x" * 2000]},
        {"attempts": [1]},
        {"attempts": [1, "two"]},
        {"firsts": pack_ids([1])},
        {"firsts": pack_ids([1, -1])},
        {"firsts": b"123"},
        {"tokens": pack_ids([1])},
        {"tokens": pack_ids([1, -1])},
        {"tokens": None},
        {"counts": pack_ids([2])},
        {"counts": pack_ids([1, 2])},
        {"counts": pack_ids([3, -1])},
        {"counts": pack_ids([1, 1, 0])},
        {"beside": [{"row": 2, "logprobs": None, "finish": None, "cached_tokens": None}]},
        {"beside": [{"row": -1, "logprobs": None, "finish": None, "cached_tokens": None}]},
        {"beside": [{"row": 0, "logprobs": None, "finish": "soon", "cached_tokens": None}]},
        {"beside": [{"row": 0, "logprobs": None, "finish": None, "cached_tokens": -1}]},
    ],
)
def test_columns_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    columns = columns_of(PLAIN)
    assert len(rows_of(columns)) == 2
    with pytest.raises(ValueError):
        rows_of({**columns, **change})


@pytest.mark.parametrize("value", [None, [], 5, b"", {"ids": []}, [{"id": "one", "attempt": 1}]])
def test_what_is_no_columns_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        rows_of(value)
