"""Every error that kvferry raises on purpose, in one tree, each with its HTTP status. Pure.

    KvferryError
    ├── BadRequest              400   a value that cannot be served; names the field
    │   ├── UnsupportedField    422   a field, or a value of it, whose effect we do not have
    │   ├── Unauthorized        401
    │   ├── ModelNotFound       404
    │   └── BodyTooLarge        413
    ├── DeadlinePassed          408   ended before its first token
    ├── NotAdmitted             429   no room now; carries retry_after_s
    ├── NoWorker                503   nobody could serve it now
    ├── RequestFailed           500   a fault of ours; names the stage
    ├── ProtocolViolation        –    a peer sent something that is not a message of ours
    ├── IllegalMove              –    we tried a move that the lifecycle tables do not hold
    └── StartupError             –    ends the process with its exit code
        ├── BadConfiguration          2
        ├── CannotBind                3
        └── ModelCannotBeLoaded       4

Three kinds of "no" exist: `None` from a call means "later"; an exception means that somebody outside erred and
its message says what to do; `assert` means that we erred.
"""

from __future__ import annotations


class KvferryError(Exception):
    """Root of the tree. `status` is the HTTP status, `kind` the `type` of OpenAI's error object."""

    status = 500
    kind = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class BadRequest(KvferryError):
    status = 400
    kind = "invalid_request_error"


class UnsupportedField(BadRequest):
    status = 422


class Unauthorized(BadRequest):
    status = 401
    kind = "authentication_error"


class ModelNotFound(BadRequest):
    status = 404


class BodyTooLarge(BadRequest):
    status = 413


class DeadlinePassed(KvferryError):
    status = 408
    kind = "timeout_error"


class NotAdmitted(KvferryError):
    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float, code: str = "not_admitted") -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class NoWorker(KvferryError):
    status = 503
    kind = "service_unavailable"


class RequestFailed(KvferryError):
    status = 500


class ProtocolViolation(KvferryError):
    """The peer's fault: counted, the message dropped, and after a limit the peer disconnected."""


class IllegalMove(KvferryError):
    """Our fault: the request is failed, the process that holds it lives (`WorkerLoop`, `Cluster`)."""


class StartupError(KvferryError):
    exit_code = 1


class BadConfiguration(StartupError):
    exit_code = 2


class CannotBind(StartupError):
    exit_code = 3


class ModelCannotBeLoaded(StartupError):
    exit_code = 4


def told(error: BaseException) -> str:
    """What others may be told of an error that is ours: the words of one that we raise, of any other its kind alone,
    since its words may hold what a client sent."""
    kind = type(error).__name__
    return f"{kind}: {error.message}" if isinstance(error, KvferryError) else kind


HTTP_ERRORS: dict[str, type[KvferryError]] = {
    cls.__name__: cls for cls in (BadRequest, DeadlinePassed, NoWorker, RequestFailed)
}
"""Errors that may travel by name in a message and be raised again at the front (NotAdmitted carries a time and
has its own message)."""
