"""Bytes of a request body to a JSON object, with every way of failing turned into a 400. Pure.

Python's parser accepts more than JSON (NaN, Infinity), keeps the last of two fields with one name, and recurses; all
three are closed here. Numbers that overflow
a float (1e309) become infinite there, so whoever reads a float still has to ask whether it is finite.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from common.errors import BadRequest
from coordinator.errors_http import shown

MAX_DEPTH = 32


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises BadRequest."""
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


def _no_constant(name: str) -> NoReturn:
    raise BadRequest(f"The body is not valid JSON: {name} is not a JSON number.", code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise BadRequest(f"The body names {shown(twice)!r} twice in one object.", code="invalid_json")
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
