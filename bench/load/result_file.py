"""A run as JSON: every setting, every figure, every request. Pure.

Only what JSON has: an infinite rate is the word "inf". Numbers of requests are milliseconds with a thousandth.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, is_dataclass
from typing import Any

from bench.load.records import Record

FORMAT = "kvferry-bench-1"


class BadResult(ValueError):
    """Not a result of ours; the message says why."""


def as_json(result: dict[str, Any]) -> str:
    return json.dumps(plain({"format": FORMAT, **result}), indent=1, allow_nan=False) + "\n"


def read_result(text: str) -> dict[str, Any]:
    """Raises BadResult."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BadResult(f"not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise BadResult(f"not a result that `kvferry bench --save-result` wrote ({FORMAT})")
    if not {"summary", "points"} & found.keys():
        raise BadResult("holds neither a run nor several")
    return found


def is_sweep(result: dict[str, Any]) -> bool:
    return "points" in result


def row_of(record: Record) -> dict[str, Any]:
    """Absolute times count from the start of the run."""
    return {
        "index": record.index,
        "outcome": record.outcome,
        "due_ms": _ms(record.due_s),
        "sent_ms": _ms(record.sent_s),
        "connect_ms": _ms(record.connect_s),
        "ttft_ms": None if record.ttft_s is None else _ms(record.ttft_s),
        "gaps_ms": [_ms(gap_s) for gap_s in record.gaps_s],
        "e2e_ms": _ms(record.e2e_s),
        "prompt_tokens": [record.asked_prompt_tokens, record.prompt_tokens],
        "output_tokens": [record.asked_output_tokens, record.output_tokens],
        "cached_tokens": record.cached_tokens,
        "status": record.status,
        "fault": record.fault,
        "words": record.words,
        "id": record.request_id,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def plain(value: Any) -> Any:
    """What JSON holds of it."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, (str, int, bool)) or value is None else str(value)
