"""Cells of the plan that are played over real processes: what each fault is there.

A killed process is replaced at once. A stopped one goes on, and a link that was cut comes back, when the request is
over or after `RESTORED_S`; both is later than the coordinator gives a worker up where it does not hear from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.chaos.plan import LATE_S, Cell, Fault, Station, cell
from tests.chaos.rules import Action
from tests.chaos.scene import Scene
from tests.chaos.stations import STATIONS, until

RESTORED_S = 1.5  # of links between workers, which nobody gives up so soon
SLOW_BYTES_PER_S = 8e6
BETWEEN_WORKERS = "P-D"


def play(cell: Cell, scene: Scene) -> None:
    """Brings the request to its station and lets the fault fall; returns when that has happened."""
    kind, of, who = cell.victim.partition(" of ")
    if of:
        _message(cell, kind, who, scene)
        return
    if cell.fault is Fault.CORRUPTED:
        _corrupted(scene, times=None if cell == EVERY_BLOCK else 1)
        return
    STATIONS[cell.station](scene)
    _STRIKES[cell.fault](scene, cell.victim)
    scene.go_on()
    scene.fillers_leave()


# ---------------------------------------------------------------- clients and processes


def _leaves(scene: Scene, victim: str) -> None:
    scene.stream.leave()


def _leaves_unheard(scene: Scene, victim: str) -> None:
    """Nobody tells the workers; their next heartbeats do."""
    rule = scene.rule("drop", "Abort", times=None)
    scene.stream.leave()
    scene.go_on()
    rule.wait()


def _sigkill(scene: Scene, victim: str) -> None:
    scene.kill(scene.who(victim))
    if victim == "C":
        assert scene.stream.answer(10).error.startswith("hung up")
        started = time.monotonic()
        scene.service.until_there()
        scene.note = f"serving again {time.monotonic() - started:.1f} s later"


def _sigterm(scene: Scene, victim: str) -> None:
    """It stays until it has handed over, or ended, what it has; how long that is, is known where something is held."""
    name = scene.who(victim)
    scene.terminate(name)
    if scene.thaw():
        return
    until(lambda: scene.service.worker(name)["state"] == "draining", 5)
    time.sleep(0.3)
    assert scene.service.processes[name].poll() is None, f"{name} left what it was about to hand over"


def _stops(scene: Scene, victim: str) -> None:
    scene.stop(scene.who(victim))


# ---------------------------------------------------------------- links


def _cut(scene: Scene, victim: str) -> None:
    """One between workers comes back soon, one to the coordinator when the worker has been given up. A silent one
    stands all the while, and in the end brings what was said."""
    ends, _, silent = victim.partition(", ")
    a, b = ends.split("-")
    worker, proxy = scene.who(b), scene.service.proxy
    (proxy.stall if silent else proxy.cut)(scene.who(a), worker)
    scene.go_on()
    scene.service.taken_over += bool(silent) and a == "C"
    if ends == BETWEEN_WORKERS:
        time.sleep(RESTORED_S)
    else:
        until(lambda: scene.service.worker(worker)["state"] == "lost")
    proxy.restore()


def _cut_for_good(scene: Scene, victim: str) -> None:
    a, b = victim.split("-")
    scene.service.proxy.cut(scene.who(a), scene.who(b))


def _slow(scene: Scene, victim: str) -> None:
    a, b = victim.split("-")
    scene.service.proxy.slow(scene.who(a), scene.who(b), SLOW_BYTES_PER_S)


_STRIKES: dict[Fault, Callable[[Scene, str], None]] = {
    Fault.LEAVES: _leaves,
    Fault.LEAVES_UNHEARD: _leaves_unheard,
    Fault.SIGKILL: _sigkill,
    Fault.SIGTERM: _sigterm,
    Fault.STOPS: _stops,
    Fault.CUT: _cut,
    Fault.CUT_FOR_GOOD: _cut_for_good,
    Fault.SLOW: _slow,
}


# ---------------------------------------------------------------- messages

_ACTIONS: dict[Fault, Action] = {Fault.LOST: "drop", Fault.DOUBLED: "double", Fault.LATE: "delay"}
_ROLES = {"P": "prefill", "D": "decode", "C": "coordinator"}
_SKIPPED = {("Block", Station.SENDING): 5, ("Tokens", Station.DECODING): 8}
"""How many of its kind go before the one that fares ill."""


def _message(cell: Cell, kind: str, who: str, scene: Scene) -> None:
    """One message of the request fares ill, on a way that is not disturbed otherwise."""
    rule = scene.rule(
        _ACTIONS[cell.fault],
        kind,
        source=_ROLES[who],
        delay_s=LATE_S,
        skip=_SKIPPED.get((kind, cell.station), 0),
        fits=_of_the_end if cell.station is Station.ENDED else _any,
    )
    scene.ask()
    rule.wait()


def _any(message: Any) -> bool:
    return True


def _of_the_end(message: Any) -> bool:
    """Last tokens, or the word that a decode worker is done."""
    rows = getattr(message, "rows", None)
    return message.outcome == "finished" if rows is None else any(row.finish for row in rows)


def _corrupted(scene: Scene, times: int | None) -> None:
    """One block between the first two workers that have it, or every one: then it goes by another pair."""
    pairs: list[tuple[str, str]] = []

    def of_first_pair(message: Any) -> bool:
        pairs.append((scene.prefill, scene.decode))
        return pairs[-1] == pairs[0]

    rule = scene.rule("corrupt", "Block", fits=of_first_pair, times=times, skip=5 if times else 0)
    scene.ask()
    rule.wait()


# ---------------------------------------------------------------- which are played

EVERY_BLOCK = Cell(
    Station.SENDING,
    Fault.CORRUPTED,
    "P-D, every block",
    migrates=True,
    counts=("kv_checksum_failures_total",),
)
SILENT = (
    Cell(Station.SENDING, Fault.CUT, "P-D, silent"),
    Cell(
        Station.DECODING,
        Fault.CUT,
        "C-D, silent",
        migrates=True,
        counts=('workers_lost_total{role="decode"}',),
    ),
)

NAMES = (
    "waiting / client leaves",
    "queued / client leaves",
    "middle chunk / client leaves",
    "last chunk / client leaves",
    "prefilled / client leaves",
    "sending / client leaves",
    "delivered / client leaves",
    "decoding / client leaves",
    "preempted / client leaves",
    "sending / client leaves, Aborts lost",
    "decoding / client leaves, Aborts lost",
    "queued / SIGKILL P",
    "first chunk / SIGKILL P",
    "middle chunk / SIGKILL P",
    "last chunk / SIGKILL P",
    "sending / SIGKILL P",
    "prefilled / SIGKILL D",
    "sending / SIGKILL D",
    "delivered / SIGKILL D",
    "decoding / SIGKILL D",
    "preempted / SIGKILL D",
    "ended / SIGKILL D",
    "decoding / SIGKILL C",
    "middle chunk / stops answering P",
    "sending / stops answering D",
    "decoding / stops answering D",
    "last chunk / SIGTERM P",
    "sending / SIGTERM P",
    "decoding / SIGTERM D",
    "sending / link cut P-D",
    "prefilled / link cut for good P-D",
    "sending / link cut for good P-D",
    "middle chunk / link cut C-P",
    "decoding / link cut C-D",
    "first chunk / link slow P-D",
    "sending / link slow P-D",
    "waiting / message lost Prefill of C",
    "waiting / message doubled Prefill of C",
    "first chunk / message lost Started of P",
    "prefilled / message lost Offer of P",
    "prefilled / message late Accept of D",
    "sending / message lost Block of P",
    "sending / message doubled Block of P",
    "sending / block corrupted P-D",
    "sending / message lost Handover of P",
    "sending / message doubled Handover of P",
    "delivered / message lost Delivered of D",
    "delivered / message late Delivered of D",
    "delivered / message late Started of D",
    "decoding / message lost Tokens of D",
    "decoding / message doubled Tokens of D",
    "decoding / message late Tokens of D",
    "ended / message lost Tokens of D",
    "ended / message lost Ended of D",
    "ended / message late Ended of D",
)


def _played(name: str) -> Cell:
    """A link between workers that is cut turns connections away here, so the sender may take the other end for gone
    sooner than it comes back: then it costs an attempt."""
    one = cell(name)
    turned_away = one.fault is Fault.CUT and one.victim == BETWEEN_WORKERS
    return replace(one, migrates=None) if turned_away else one


OVER_SHM = (
    "sending / client leaves",
    "sending / SIGKILL P",
    "sending / SIGKILL D",
    "sending / link cut P-D",
    "sending / block corrupted P-D",
    "sending / message lost Block of P",
)
"""Played a second time where blocks are read from the sender's memory and only their headers travel."""

REAL: dict[str, Cell] = {one.name: one for one in (*map(_played, NAMES), EVERY_BLOCK, *SILENT)}
