"""The matrix of phase × fault: every cell, who is hit, and what must come of it. Data alone.

The phases are those of one request, told apart by where it stands, finer than `common.lifecycle.Phase`. A cell says
what its client gets, whether the request must, must not or may be dispatched again ("migrates"), and which counters
tell of it. A fault that cannot happen in a phase stands in `SENSELESS`, with why. `virtual.py` runs every cell over
the pure objects, `real.py` some of them over processes.

Victims: P and D are the prefill and the decode worker that the request was given to, one of two each, or the only one;
C is the coordinator. A fault passes: a stopped process goes on, a killed one is replaced and a link is restored after
`LASTS_S`, which is longer than the coordinator waits for a worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

LASTS_S = 6.0
LATE_S = 1.5
SLOW_S = 0.3
"""What a slow link adds to each message, each way."""


class Station(StrEnum):
    """Where the request stands when the fault falls."""

    WAITING = "waiting"  # in the coordinator's queue: no worker has room
    QUEUED = "queued"  # at P, which computes something else
    FIRST_CHUNK = "first chunk"
    MIDDLE_CHUNK = "middle chunk"
    LAST_CHUNK = "last chunk"
    PREFILLED = "prefilled"  # first token out, no decode worker has accepted it
    SENDING = "sending"  # accepted, blocks of the computed prompt under way
    DELIVERED = "delivered"  # D owns it; it joins at D's next step
    DECODING = "decoding"
    PREEMPTED = "preempted"
    ENDED = "ended"  # D is done with it; its last words are under way


class Fault(StrEnum):
    LEAVES = "client leaves"
    LEAVES_UNHEARD = "client leaves, Aborts lost"
    SIGTERM = "SIGTERM"
    SIGTERM_AT_ONCE = "SIGTERM, no time"
    SIGKILL = "SIGKILL"
    SIGKILL_FOR_GOOD = "SIGKILL for good"
    SIGKILL_TWICE = "SIGKILL, and of the next one"
    STOPS = "stops answering"
    CUT = "link cut"
    CUT_FOR_GOOD = "link cut for good"
    SLOW = "link slow"
    LOST = "message lost"
    DOUBLED = "message doubled"
    LATE = "message late"
    CORRUPTED = "block corrupted"


Outcome = Literal["exact", "left", "broken", "error:NoWorker", "error:DeadlinePassed", "error:RequestFailed"]
"""exact: the whole answer, token for token, after a pause at most. left: an exact beginning, and all of it freed.
broken: an exact beginning, then the connection ends, because the process that holds it is gone. error: an exact
beginning, then a structured error of that class, which names the stage."""


@dataclass(frozen=True, slots=True)
class Cell:
    """`victim`: a party ("D", "only D"), a link ("P-D"), or a message and who says it ("Accept of D").
    `migrates`: None where time decides. `counts`: counters that have risen at its end."""

    station: Station
    fault: Fault
    victim: str
    outcomes: tuple[Outcome, ...] = ("exact",)
    migrates: bool | None = False
    counts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.station} / {self.fault}" + (f" {self.victim}" if self.victim else "")


S, F = Station, Fault
STATIONS = tuple(Station)
AT_PREFILL = (S.QUEUED, S.FIRST_CHUNK, S.MIDDLE_CHUNK, S.LAST_CHUNK, S.PREFILLED, S.SENDING)
"""P holds it and D does not own it yet."""
AT_DECODE = (S.DELIVERED, S.DECODING, S.PREEMPTED)
LINKS = ("P-D", "C-P", "C-D")

# Messages that can be under way in a phase or that end it, and who says them. (In waiting there is none about it but
# the dispatch that ends it.)
MESSAGES: dict[Station, tuple[str, ...]] = {
    S.WAITING: ("Prefill of C",),
    S.QUEUED: ("Accepted of P",),
    S.FIRST_CHUNK: ("Started of P", "Offer of P", "Accept of D"),
    S.MIDDLE_CHUNK: ("Block of P", "Credit of D"),
    S.LAST_CHUNK: ("Tokens of P",),
    S.PREFILLED: ("Later of D", "Offer of P", "Accept of D"),
    S.SENDING: ("Block of P", "Credit of D", "Handover of P"),
    S.DELIVERED: ("Delivered of D", "Started of D", "Tokens of D", "Ended of P"),
    S.DECODING: ("Tokens of D", "Heartbeat of D", "HeartbeatAck of C"),
    S.PREEMPTED: ("Heartbeat of D", "Tokens of D"),
    S.ENDED: ("Tokens of D", "Ended of D"),
}

SENSELESS: dict[tuple[Station, Fault], str] = {
    (S.WAITING, F.LEAVES_UNHEARD): "no worker has it, so nobody is told",
    (S.WAITING, F.SIGKILL_TWICE): "nothing runs it, so no death is its doing",
    (S.QUEUED, F.SIGKILL_TWICE): "nothing runs it, so no death is its doing",
    (S.ENDED, F.SIGKILL_TWICE): "it does not go on",
    **{
        (station, F.CORRUPTED): "no block of it is under way"
        for station in STATIONS
        if station not in (S.MIDDLE_CHUNK, S.SENDING)
    },
}


def cells() -> list[Cell]:
    """All of them, by phase."""
    return [cell for station in STATIONS for cell in _of(station) if (station, cell.fault) not in SENSELESS]


def cell(name: str) -> Cell:
    return next(one for one in cells() if one.name == name)


def _of(station: Station) -> Iterator[Cell]:
    yield from _leaves(station)
    yield from _terminated(station)
    yield from _killed(station)
    for victim in ("P", "D", "only P", "only D"):
        migrates = None if station is S.WAITING else station in _HELD_BY[victim]
        yield Cell(station, F.STOPS, victim, migrates=migrates, counts=_LOST[victim])
    for link in LINKS:
        yield Cell(station, F.CUT, link, migrates=_cut_migrates(station, link), counts=_LOST[link])
        yield Cell(station, F.SLOW, link)
    for link in ("P-D", "only P-D"):
        migrates = None if station in (S.WAITING, S.DELIVERED) else station in AT_PREFILL
        yield Cell(station, F.CUT_FOR_GOOD, link, migrates=migrates)
    for message in MESSAGES[station]:
        for fault in (F.LOST, F.DOUBLED, F.LATE):
            yield Cell(station, fault, message, migrates=_message_migrates(station, fault, message))
    yield Cell(station, F.CORRUPTED, "P-D", counts=("kv_checksum_failures_total",))


_HELD_BY = {"P": AT_PREFILL, "D": AT_DECODE, "only P": AT_PREFILL, "only D": (*AT_PREFILL, *AT_DECODE)}
"""Phases in which a victim's end costs a next attempt. Of a decode worker that does not own the request yet only its
place is lost, if there is another one."""
_NOTICED = {"P": (S.WAITING,), "only P": (S.WAITING,), "D": (S.WAITING, *AT_PREFILL), "only D": (S.WAITING,)}
"""Phases in which it depends on who notices a death first. Of a decode worker's the prefill worker may: it gives the
transfer up, where the coordinator would name it another target."""
_LOST = {
    "P": ('workers_lost_total{role="prefill"}',),
    "D": ('workers_lost_total{role="decode"}',),
    "only P": ('workers_lost_total{role="prefill"}',),
    "only D": ('workers_lost_total{role="decode"}',),
    "P-D": (),
    "C-P": ('workers_lost_total{role="prefill"}',),
    "C-D": ('workers_lost_total{role="decode"}',),
}


def _terminated(station: Station) -> Iterator[Cell]:
    """With time, what a worker has ends there. Without, it is given back; the coordinator's own ends with an error."""
    for victim in ("P", "D", "C", "only P", "only D"):
        yield Cell(station, F.SIGTERM, victim)
    for victim in ("P", "D", "only P", "only D"):
        yield Cell(station, F.SIGTERM_AT_ONCE, victim, migrates=_gives_back(station, victim))
    yield Cell(station, F.SIGTERM_AT_ONCE, "C", outcomes=("error:NoWorker",))


def _gives_back(station: Station, victim: str) -> bool | None:
    if victim.endswith("P"):
        return None if station is S.DELIVERED else station in AT_PREFILL  # it may have heard so
    if victim == "only D" or station not in (S.QUEUED, S.FIRST_CHUNK, S.PREFILLED):
        return station in (*AT_PREFILL, *AT_DECODE)
    return None if station is S.FIRST_CHUNK else False  # it is not there yet: only its place is lost


_RUNS_AT = {"P": (S.FIRST_CHUNK, S.MIDDLE_CHUNK, S.LAST_CHUNK, S.PREFILLED, S.SENDING), "D": AT_DECODE}
"""Phases in which a victim's death may be the request's doing."""


def _killed(station: Station) -> Iterator[Cell]:
    for victim in ("P", "D", "only P", "only D"):
        migrates = None if station in _NOTICED[victim] else station in _HELD_BY[victim]
        yield Cell(station, F.SIGKILL, victim, migrates=migrates, counts=_LOST[victim])
    yield Cell(station, F.SIGKILL, "C", outcomes=("broken",))
    migrates = None if station is S.WAITING else station in AT_PREFILL
    yield Cell(station, F.SIGKILL_FOR_GOOD, "only P", migrates=migrates, counts=_LOST["P"])
    for victim in "PD":
        if station in _RUNS_AT[victim]:
            poison: tuple[Outcome, ...] = ("error:RequestFailed",)
            yield Cell(station, F.SIGKILL_TWICE, victim, poison, migrates=True, counts=_LOST[victim])
    outcomes = ("exact",) if station is S.ENDED else _no_decode_worker(station)
    yield Cell(station, F.SIGKILL_FOR_GOOD, "only D", outcomes, migrates=None, counts=_LOST["D"])


def _no_decode_worker(station: Station) -> tuple[Outcome, ...]:
    """What it waits for in vain depends on whether the prefill worker has said the first token by then."""
    if station in (S.PREFILLED, S.SENDING, *AT_DECODE):
        return ("error:RequestFailed",)
    return ("error:DeadlinePassed", "error:RequestFailed")


def _leaves(station: Station) -> Iterator[Cell]:
    """A client that goes while the last token is on its way may have it or not."""
    outcomes: tuple[Outcome, ...] = ("left", "exact") if station is S.ENDED else ("left",)
    counts = () if station is S.ENDED else ("requests_aborted_total",)
    for fault in (F.LEAVES, F.LEAVES_UNHEARD):
        yield Cell(station, fault, "", outcomes=outcomes, counts=counts)


def _cut_migrates(station: Station, link: str) -> bool | None:
    """A worker that the coordinator does not hear for long is taken for lost; what it owns goes on elsewhere."""
    if link == "C-D":  # P hands it over to a D that nobody hears
        return None if station is S.WAITING else True
    if link == "C-P":  # D's word is enough, so P goes on unheard
        return None if station is S.WAITING else False
    # Where the connection breaks P gives up before it is restored; where it only carries nothing P does not.
    return None if station in (S.WAITING, S.DELIVERED, *AT_PREFILL) else False


def _message_migrates(station: Station, fault: Fault, message: str) -> bool:
    """Everything is asked for again, but for tokens on their way to the front, of which a later one tells."""
    if message != "Tokens of D" or station is S.DELIVERED or fault is F.DOUBLED:
        return False
    return fault is F.LOST or station is not S.ENDED
