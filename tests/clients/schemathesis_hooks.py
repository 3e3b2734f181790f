"""Loaded by schemathesis: short answers, and which refusals of fitting bodies are meant.

A schema cannot say everything. Where a fitting body breaks a rule between two fields it is mended, so that more of
them are answered; what is refused all the same for a reason in `beyond_schema` is no fault, and neither is 3.0 in the
place of a whole number: to JSON schema it is one, and to us it is none.
"""

from __future__ import annotations

import re
from typing import Any

import schemathesis

from tests.coordinator.beyond_schema import BEYOND

MAX_TOKENS = 2
CONTEXT = 8192
NO_WHOLE_NUMBER = (r"should be a valid integer", r"token ids only, which are whole numbers")


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, **kwargs: Any) -> None:
    body = case.body
    if isinstance(body, dict) and ("messages" in body or "prompt" in body):
        _shorten(body)
        if isinstance(body.get("stream_options"), dict) and body.get("stream") in (None, False):
            body["stream"] = True
        if body.get("top_logprobs") and body.get("logprobs") in (None, False):
            body["logprobs"] = True


def _shorten(body: dict[str, Any]) -> None:
    """Answers of a few tokens, and no change to a number that is there to be refused."""
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        value = body.get(name)
        if type(value) is int and MAX_TOKENS < value < CONTEXT:
            body[name] = MAX_TOKENS
    if body.get("max_completion_tokens") is None and body.get("max_tokens") is None:
        body["max_tokens"] = MAX_TOKENS


@schemathesis.hook
def filter_failure(
    context: schemathesis.HookContext, failure: Any, case: schemathesis.Case, response: schemathesis.Response
) -> bool:
    """False: no fault."""
    if type(failure).__name__ != "RejectedPositiveData":
        return True
    message = response.json()["error"]["message"]
    meant = BEYOND + NO_WHOLE_NUMBER if _has_whole_float(case.body) else BEYOND
    return not any(re.search(reason, message) for reason in meant)


def _has_whole_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_whole_float, value.values()))
    if isinstance(value, list):
        return any(map(_has_whole_float, value))
    return isinstance(value, float) and value.is_integer()
