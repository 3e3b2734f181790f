"""OpenAI's error object for every error the front can answer with. Pure.

`{"error": {"message", "type", "param", "code"}}`, a few hundred bytes whatever came in: messages are cut, the
input is never echoed beyond a field's name, and an exception that is not ours says nothing about itself.
"""

from __future__ import annotations

import json
import math

from common.errors import (
    BadRequest,
    DeadlinePassed,
    KvferryError,
    ModelNotFound,
    NotAdmitted,
    NoWorker,
    RequestFailed,
    Unauthorized,
)

MAX_MESSAGE_CHARS = 1000
MAX_NAME_CHARS = 120
RETRY_AFTER_NO_WORKER_S = 1.0

CODES: dict[type[KvferryError], str] = {
    BadRequest: "invalid_value",
    DeadlinePassed: "deadline",
    NotAdmitted: "not_admitted",
    NoWorker: "no_worker",
    RequestFailed: "request_failed",
}
"""What an error is called where whoever raised it had no closer word."""

Headers = list[tuple[bytes, bytes]]


class RouteNotFound(KvferryError):
    status = 404
    kind = "invalid_request_error"


class NotForPages(KvferryError):
    status = 403
    kind = "permission_error"


class MethodNotAllowed(KvferryError):
    status = 405
    kind = "invalid_request_error"


class HeadTooLarge(KvferryError):
    status = 431
    kind = "invalid_request_error"


class ObjectNotFound(KvferryError):
    status = 404
    kind = "invalid_request_error"


class Conflict(KvferryError):
    """What is asked for does not go with how things stand."""

    status = 409
    kind = "invalid_request_error"


def code_of(error: KvferryError) -> str:
    """Never empty: programs and the log tell errors apart by it."""
    return error.code or CODES.get(type(error), "internal_error")


def internal_error() -> KvferryError:
    """What a client is told of an exception that we did not raise on purpose."""
    return KvferryError("The server failed on this request; its log has the reason.", code="internal_error")


def shown(name: str) -> str:
    """A name that came from outside, fit for a message: no control characters or surrogates, cut."""
    plain = name.encode("utf-8", "backslashreplace").decode("utf-8")
    plain = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in plain[:MAX_NAME_CHARS])
    return plain if len(name) <= MAX_NAME_CHARS else plain + "…"


def quoted(name: str) -> str:
    """The same in quotes, with what cannot be printed escaped once."""
    return repr(name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "…")


def error_object(error: KvferryError) -> bytes:
    message = error.message
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "…"
    inside = {"message": message, "type": error.kind, "param": error.param, "code": code_of(error)}
    return json.dumps({"error": inside}).encode()


def error_headers(error: KvferryError, body: bytes) -> Headers:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    retry_after_s = _retry_after_s(error)
    if retry_after_s is not None:
        # Whole seconds are what every client reads, and 0 would invite an immediate retry.
        headers.append((b"retry-after", str(max(1, math.ceil(retry_after_s))).encode()))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def _retry_after_s(error: KvferryError) -> float | None:
    if isinstance(error, NotAdmitted):
        return error.retry_after_s
    return RETRY_AFTER_NO_WORKER_S if isinstance(error, NoWorker) else None


def model_not_found(asked: str, served: tuple[str, ...]) -> ModelNotFound:
    return ModelNotFound(
        f"The model {quoted(asked)} is not served here. Served: {', '.join(served)}.",
        param="model",
        code="model_not_found",
    )
