from __future__ import annotations

import json
import time

import pytest

from common.errors import BadRequest
from coordinator.door.json_body import MAX_DEPTH, MAX_NODES, MAX_STRINGS, MAX_VALUES, parse_object
from coordinator.openai.schema import MAX_PROMPT_IDS


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
        (b'{"a": ' + b"[" * 60_000 + b"]" * 60_000 + b"}", "levels deep"),
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
    names = [*range(60_000), 59_999]
    started_s = time.monotonic()
    with pytest.raises(BadRequest, match="'59999' twice"):
        parse_object(b"{" + b",".join(b'"%d":0' % name for name in names) + b"}")
    assert time.monotonic() - started_s < 2


LISTS = b'{"a": [' + b"[]," * MAX_NODES + b"1]}"
NAMES = b"{" + b",".join(b'"%d":0' % name for name in range(MAX_NODES)) + b"}"
VALUES = b'{"a": [' + b"0," * MAX_VALUES + b"0,1]}"
STRINGS = b'{"a": [' + b'["[", "["],' * (MAX_STRINGS // 2) + b"1]}"
UNENDED = b'{"a": "' + b'\\"[{:' * (MAX_NODES * 2)


@pytest.mark.parametrize("body", [LISTS, NAMES, VALUES, STRINGS, LISTS.replace(b",", b',"",')])
def test_what_would_hold_up_every_thread_is_refused_before_it_is_parsed(body: bytes) -> None:
    started_s = time.monotonic()
    with pytest.raises(BadRequest, match="holds more than"):
        parse_object(body)
    assert time.monotonic() - started_s < 1


def test_text_may_be_full_of_brackets() -> None:
    text = '[{":,' * MAX_NODES + "\\"
    assert parse_object(json.dumps({"prompt": text, "list": [text]}).encode()) == {
        "prompt": text,
        "list": [text],
    }
    ids = [0] * MAX_PROMPT_IDS
    assert parse_object(json.dumps({"prompt": ids}).encode())["prompt"] == ids
    started_s = time.monotonic()
    with pytest.raises(BadRequest, match="not valid JSON"):
        parse_object(UNENDED)
    assert time.monotonic() - started_s < 1
