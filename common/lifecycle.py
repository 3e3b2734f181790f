"""The life of a request and of its KV transfer: two tables, and nothing else decides a phase. Pure.

Each process keeps its own view of a request and advances it by the same table; the stamps of the moves are the
latency metrics (a duration is always taken inside one process). The owner of a phase is the process that holds
the request, not a role. `python -m common.lifecycle` prints both tables as they stand in the README.

Why no deadlock. What each phase may have to wait for; a line names only lines above it, so there is no circle:

    PREFILLING at a prefill worker  nothing: slot and blocks for the whole prompt are its own before its first chunk,
                                    and no decode worker is asked for anything in order to compute
    PREFILLING, DECODING at a       nothing, for one of them at least: a next block is taken from a transfer not yet
      decode worker                 delivered, then from another; one full-length request fits alone
    accepted transfer               its own prompt's PREFILLING, and frames of which the prefill worker has all
    DECODE_READY                    a slot: somebody's DECODING or PREFILLING at the same worker
    PREEMPTED, QUEUED at a          slot, and blocks for all of it: whatever above holds some of this worker's.
      decode worker                 Meanwhile no transfer is accepted there that could keep a preempted one out
    KV_READY, an offered transfer   room at a decode worker for all of it: whatever above holds some of that one's
    QUEUED at a prefill worker      slot, and blocks for all of it: PREFILLING or KV_READY at the same worker
    WAITING                         room by the coordinator's account of a pair: whatever above it is counted for

Whoever waits for blocks of a pool holds none of it, but for a running sequence, which takes what it lacks from others:
so no two can each hold half. A process never waits for another one's loop: sends do not block, and what matters is
said again. Who waits for another process (transfers, offered or accepted, and WAITING) does so up to a limit; the rest
wait for work of their own worker, and one that hangs or dies is given up by the coordinator. That such work does not
go on for ever past one that waits is fairness: a bounded number of its class pass it, then room is kept. (Local
prefills may pass an offer without end: that has its limit.)
The tests that try: `tests/bench/test_deadlock.py`, and the state machines (`make machines`).
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

from common.errors import IllegalMove


class Phase(StrEnum):
    WAITING = "waiting"  # in the coordinator's queue
    QUEUED = "queued"  # given to a worker, not started
    PREFILLING = "prefilling"  # its prompt is being computed, chunk by chunk
    KV_READY = "kv_ready"  # prompt computed, first token out, KV still with the prefill worker
    DECODE_READY = "decode_ready"  # KV verified at the decode worker, waiting for a place in the batch
    DECODING = "decoding"
    PREEMPTED = "preempted"  # put out of the batch for lack of blocks
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class TransferPhase(StrEnum):
    OFFERED = "offered"
    ACCEPTED = "accepted"
    SENDING = "sending"
    DELIVERED = "delivered"
    REVOKED = "revoked"
    CANCELLED = "cancelled"
    FAILED = "failed"


_ENDS = frozenset({Phase.FINISHED, Phase.ABORTED, Phase.FAILED})
LIVE_PHASES = {str(phase): phase for phase in Phase if phase not in _ENDS}
"""By their names, in the order of the table."""
_OUT = _ENDS | {Phase.WAITING}  # an end, or back to the queue with the next attempt


def _moves(*phases: Phase) -> frozenset[Phase]:
    return frozenset(phases) | _OUT


REQUEST_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.QUEUED}) | _ENDS,
    Phase.QUEUED: _moves(Phase.PREFILLING),
    Phase.PREFILLING: _moves(Phase.KV_READY, Phase.DECODING, Phase.PREEMPTED),
    Phase.KV_READY: _moves(Phase.DECODE_READY),
    Phase.DECODE_READY: _moves(Phase.DECODING, Phase.PREEMPTED),
    Phase.DECODING: _moves(Phase.PREEMPTED),
    Phase.PREEMPTED: _moves(Phase.PREFILLING, Phase.DECODE_READY),
    Phase.FINISHED: frozenset(),
    Phase.ABORTED: frozenset(),
    Phase.FAILED: frozenset(),
}

_T = TransferPhase
_LOST = frozenset({_T.CANCELLED, _T.FAILED})
TRANSFER_MOVES: dict[TransferPhase, frozenset[TransferPhase]] = {
    _T.OFFERED: frozenset({_T.ACCEPTED, _T.REVOKED}) | _LOST,
    _T.ACCEPTED: frozenset({_T.SENDING, _T.DELIVERED, _T.REVOKED}) | _LOST,
    _T.SENDING: frozenset({_T.DELIVERED, _T.REVOKED}) | _LOST,
    _T.REVOKED: frozenset({_T.OFFERED}) | _LOST,
    _T.DELIVERED: frozenset(),
    _T.CANCELLED: frozenset(),
    _T.FAILED: frozenset(),
}


def is_end(phase: Phase) -> bool:
    return phase in _ENDS


@cache
def way(start: Phase, to: Phase) -> tuple[Phase, ...]:
    """The fewest moves from one phase to another that do not go by the queue; none where there is no way."""
    ways: dict[Phase, tuple[Phase, ...]] = {start: ()}
    found = [start]
    for phase in found:  # grows as it is walked, so the nearest come first
        for following in Phase:
            if following in REQUEST_MOVES[phase] - _OUT and following not in ways:
                ways[following] = (*ways[phase], following)
                found.append(following)
    return ways.get(to, ())


class Life:
    """One process's view of one request: its phase and how long it stood in each.

    A move that the table does not hold raises `IllegalMove` and changes nothing.
    """

    __slots__ = ("_durations_s", "phase", "since")

    def __init__(self, phase: Phase, now: float) -> None:
        self.phase = phase
        self.since = now  # its last move
        self._durations_s: dict[Phase, float] = {}

    def move(self, to: Phase, now: float) -> None:
        if to not in REQUEST_MOVES[self.phase]:
            raise IllegalMove(f"a request cannot go from {self.phase} to {to}")
        self._durations_s[self.phase] = self.seconds_in(self.phase, now)
        self.phase = to
        self.since = now

    def go(self, to: Phase, now: float) -> None:
        """As `move`, by what lies between where this view has missed it. Nothing where no way leads there."""
        for phase in way(self.phase, to):
            self.move(phase, now)

    def seconds_in(self, phase: Phase, now: float) -> float:
        """Seconds spent in `phase` so far, all visits together."""
        before = self._durations_s.get(phase, 0.0)
        return before + max(0.0, now - self.since) if phase is self.phase else before

    def durations_s(self, now: float) -> dict[str, float]:
        """Phase name to seconds, for the phases left and the present one unless it is an end."""
        seen = {str(phase): seconds for phase, seconds in self._durations_s.items()}
        if not is_end(self.phase):
            seen[str(self.phase)] = self.seconds_in(self.phase, now)
        return seen


class TransferLife:
    """One side's view of one transfer."""

    __slots__ = ("phase",)

    def __init__(self, phase: TransferPhase = TransferPhase.OFFERED) -> None:
        self.phase = phase

    def move(self, to: TransferPhase) -> None:
        if to not in TRANSFER_MOVES[self.phase]:
            raise IllegalMove(f"a transfer cannot go from {self.phase} to {to}")
        self.phase = to


def tables_as_markdown() -> str:
    lines = ["| request | may go to |", "|---|---|"]
    lines += [f"| {p} | {', '.join(q for q in Phase if q in to) or '–'} |" for p, to in REQUEST_MOVES.items()]
    lines += ["", "| transfer | may go to |", "|---|---|"]
    lines += [
        f"| {p} | {', '.join(q for q in TransferPhase if q in to) or '–'} |"
        for p, to in TRANSFER_MOVES.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables_as_markdown())  # noqa: T201 (a command for people)
