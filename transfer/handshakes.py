"""Why two processes do not come together, from ZeroMQ's events, in words for whoever runs them.

ZeroMQ tries for ever and says nothing. A worker with another key, or with none, would look as one whose coordinator
is not up yet; so both sides say what they see, at once and then every SAY_EVERY_S, and count it.

What nobody hears of: first bytes that are none of ZeroMQ's (HTTP, random ones, its protocol before 3). It hangs up at
once and tells of the end of a connection only, as of any that ends; that none shook hands on it cannot be known, for
the event of that names no connection. So it is not counted rather than guessed.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from common.counters import Counters

log = logging.getLogger(__name__)

SAY_EVERY_S = 10.0
MAX_KINDS = 1000

FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
ENDS_THE_CALLS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""After one of these ZeroMQ's socket does not call again."""

_COMPARE = "compare `kvferry keys show FILE` there and here"
_ANOTHER = f"it may have another key, or none: {_COMPARE}"
_NONE = "start this one with --curve-key, if the cluster has a key; else, is it a port of kvferry?"
_OR_ELSE = "or something that speaks no kvferry"
_HUNG_UP = (errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED)


@dataclass(frozen=True, slots=True)
class Failure:
    """`reason` is the label that it is counted under; `words` are empty where nobody need act."""

    reason: str
    words: str


def failure_of(event: int, value: int, *, keyed: bool, listens: bool) -> Failure:
    """`keyed`: this process has a key. `listens`: the other one called us."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return Failure("no_key", _without_key(keyed, listens))
    other_key = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
    if listens:
        if other_key:
            return Failure("other_key", f"a process with another key calls: {_COMPARE}")
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return Failure("not_ours", "something that is no process of kvferry calls")
        return Failure("unfinished", "")  # probes of ports, and callers that died
    if other_key:
        return Failure("other_key", f"our key is not the one that is asked for there: {_COMPARE}")
    if value in _HUNG_UP:  # it may have read our greeting, and left, before we read its own
        return Failure("hung_up", f"it hangs up on us: {_ANOTHER if keyed else _NONE}")
    return Failure("unfinished", "it takes the call and does not answer")


def _without_key(keyed: bool, listens: bool) -> str:
    if listens and keyed:
        return (
            f"a process without the cluster's key calls, {_OR_ELSE}: "
            "if it is ours, start that one with --curve-key, the same file as here"
        )
    if listens:
        return (
            f"a process with a cluster's key calls, and we have none, {_OR_ELSE}: "
            "if it is ours, start this one with --curve-key too"
        )
    if keyed:
        return "no key is in use there: start that one with --curve-key, the same file as here"
    return "the cluster's key is asked for there, and we have none: start this one with --curve-key"


class Failures:
    """Counts them, and says each kind at most every SAY_EVERY_S."""

    def __init__(
        self, counters: Counters, *, keyed: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._counters = counters
        self._keyed = keyed
        self._clock = clock
        self._said: dict[tuple[str, str], float] = {}
        self._unsaid: dict[tuple[str, str], int] = {}

    def note(self, where: str, event: int, value: int, *, listens: bool) -> None:
        """`where`: our own endpoint, or the one that we call."""
        failure = failure_of(event, value, keyed=self._keyed, listens=listens)
        name = "refused_handshakes_total" if listens else "failed_handshakes_total"
        self._counters.add(name, reason=failure.reason)
        if failure.words:
            self._say(where, failure.words)

    def _say(self, where: str, words: str) -> None:
        kind, now = (where, words), self._clock()
        if kind in self._said and now - self._said[kind] < SAY_EVERY_S:
            self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
            return
        if len(self._said) >= MAX_KINDS:
            oldest = next(iter(self._said))
            del self._said[oldest]
            self._unsaid.pop(oldest, None)
        self._said[kind] = now
        unsaid = self._unsaid.pop(kind, 0)
        log.warning("%s: %s%s", where, words, f" ({unsaid} more like it)" if unsaid else "")
