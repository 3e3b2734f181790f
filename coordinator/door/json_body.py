"""Bytes of a request body to a JSON object, with every way of failing turned into a 400. Pure.

Python's parser accepts more than JSON (NaN, Infinity), keeps the last of two fields with one name, and recurses; all
three are closed here. It also stops every thread while it works, for two seconds where 4 MB are a million empty lists,
so what the body holds is counted first. Numbers that overflow a float (1e309) become infinite there, so whoever reads
a float still has to ask whether it is finite.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, NoReturn

from common.errors import BadRequest
from coordinator.errors_http import quoted

MAX_DEPTH = 32
MAX_NODES = 1 << 16
"""Lists, objects and names of fields: 4,096 messages of a few text parts each."""
MAX_VALUES = 5 << 17
"""In all lists and objects together: as many token ids as a request may hold, and the rest of it."""
MAX_STRINGS = 1 << 17

_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises BadRequest."""
    _check_size(body)
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise BadRequest("The body is not valid UTF-8.", code="invalid_json") from error
    except RecursionError as error:
        raise _too_deep() from error
    except json.JSONDecodeError as error:
        raise BadRequest(
            f"The body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno}).",
            code="invalid_json",
        ) from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise BadRequest("The body holds a number that is too long.", code="invalid_json") from error
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and deeper_than(value, MAX_DEPTH):
        raise _too_deep()
    return value


def _check_size(body: bytes) -> None:
    if not _is_small(body) and not _is_small(_outside_strings(body)):  # text may be full of brackets
        raise _too_complex()


def _is_small(text: bytes) -> bool:
    nodes = text.count(b"[") + text.count(b"{") + text.count(b":")
    return nodes <= MAX_NODES and text.count(b",") <= MAX_VALUES


def _outside_strings(body: bytes) -> bytes:
    """In a loop of ours, which other threads can interrupt."""
    parts: list[bytes] = []
    end = 0
    for string in _STRINGS.finditer(body):
        if len(parts) > MAX_STRINGS:
            raise _too_complex()
        parts.append(body[end : string.start()])
        end = string.end()
    return b"".join((*parts, body[end:]))


def _too_complex() -> BadRequest:
    return BadRequest(
        f"The body holds more than {MAX_NODES} lists, objects and fields, more than {MAX_STRINGS} strings, or more "
        f"than {MAX_VALUES} values.",
        code="body_too_complex",
    )


def _no_constant(name: str) -> NoReturn:
    raise BadRequest(f"The body is not valid JSON: {name} is not a JSON number.", code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise BadRequest(f"The body names {quoted(twice)} twice in one object.", code="invalid_json")
    return made


def deeper_than(value: Any, levels: int) -> bool:
    """Whether lists and objects lie in each other more than so many times."""
    level = [value]
    for _ in range(levels):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


def _too_deep() -> BadRequest:
    return BadRequest(f"The body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")
