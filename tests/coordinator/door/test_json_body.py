from __future__ import annotations

import time

import pytest

from common.errors import BadRequest
from coordinator.door.json_body import MAX_DEPTH, parse_object


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": "\xff"}', "not valid UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too long"),
        (b'{"a": 1, "b": 2, "a": 1}', "names 'a' twice"),
        (b'{"a": [{"x\\n": 1, "\\u0078\\n": 1}]}', "twice"),
        (b'{"a": ' + b"[" * 3000 + b"]" * 3000 + b"}", "levels deep"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "levels deep"),
        (b'{"a": ' + b'{"a": ' * 100 + b"1" + b"}" * 101, "levels deep"),
        (b'{"a": ' + b"[" * 3000, "levels deep"),
    ],
)
def test_refused(body: bytes, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as refused:
        parse_object(body)
    assert refused.value.status == 400
    assert len(refused.value.message) < 200


def test_depth_is_counted_exactly() -> None:
    def nested(levels: int) -> bytes:  # the object itself is one
        return b'{"a": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b', "b": [[], [], []]}'

    parse_object(nested(MAX_DEPTH))
    with pytest.raises(BadRequest):
        parse_object(nested(MAX_DEPTH + 1))


def test_many_flat_brackets_are_fine() -> None:
    assert len(parse_object(b'{"a": [' + b",".join([b"[]"] * 1000) + b"]}")["a"]) == 1000


def test_finding_the_name_that_is_there_twice_is_quick() -> None:
    names = [*range(200_000), 199_999]
    started_s = time.monotonic()
    with pytest.raises(BadRequest, match="'199999' twice"):
        parse_object(b"{" + b",".join(b'"%d":0' % name for name in names) + b"}")
    assert time.monotonic() - started_s < 2
