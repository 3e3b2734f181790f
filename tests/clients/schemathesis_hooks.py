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
FORMS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
NO_WHOLE_NUMBER = (r"should be a valid integer", r"token ids only, which are whole numbers")


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, **kwargs: Any) -> None:
    body = case.body
    fits = case.meta is None or case.meta.generation.mode == schemathesis.GenerationMode.POSITIVE
    if isinstance(body, dict) and case.operation.path.startswith("/v1/"):
        _shorten(body)
        if fits:
            _mend(body)


def _shorten(body: dict[str, Any]) -> None:
    """Answers of a few tokens, and no change to a number that is there to be refused."""
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        value = body.get(name)
        if type(value) is int and MAX_TOKENS < value < CONTEXT:
            body[name] = MAX_TOKENS
    if body.get("max_completion_tokens") is None and body.get("max_tokens") is None:
        body["max_tokens"] = MAX_TOKENS


def _mend(body: dict[str, Any]) -> None:
    """Bodies that fit have every field at once, and fields that contradict each other among them."""
    if body.get("stream_options"):
        body["stream"] = True
    if body.get("top_logprobs"):
        body["logprobs"] = True
    if body.get("max_tokens") is not None:
        body.pop("max_completion_tokens", None)
    asked = [name for name in FORMS if body.get(name) is not None]
    for name in asked[1:]:
        body[name] = None
    if asked:
        body.update(ignore_eos=None, stop_token_ids=None)
    if body.get("best_of") is not None:
        body["best_of"] = body.get("n") or 1
    inside = [(name, value) for name, value in (body.get("structured_outputs") or {}).items() if value]
    if inside:
        body["structured_outputs"] = dict(inside[:1])


@schemathesis.hook
def filter_failure(
    context: schemathesis.HookContext, failure: Any, case: schemathesis.Case, response: schemathesis.Response
) -> bool:
    """False: no fault."""
    if type(failure).__name__ == "AcceptedNegativeData" and response.status_code == 413:
        return False  # refused for its size, before anything in it was read
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
