"""Which workers there are, whether they live, and what they last said of themselves. Pure.

A worker is its id; one life of it is its incarnation. A registration is checked against the fingerprint of the
workers already here (KV may only pass between equals) and against the coordinator's own tokenizer and vocabulary (it
sends ids that they must have). Liveness is the heartbeat, never a lack of output; a worker is lost when none came for
`lost_after_s`, when its model thread made no progress for `hung_after_s`, or when a new incarnation of it registers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from common.counters import HISTOGRAM_BUCKETS
from common.fingerprint import Value, first_difference
from common.messages import Heartbeat, Load, Register, Registered, RegistrationRefused, Role, Sender
from common.request import Incarnation, WorkerId
from common.roles import id_in_other_role
from common.wire import longest_model_len

MAX_COUNTERS = 512
COMES_BACK_WITHIN_S = 600.0
"""Who left to come back in another role is waited for so long; a large model may load for minutes."""
_COUNTER = re.compile(
    r'[a-z][a-z0-9_]{0,80}(\{[a-z_]{1,40}="[^"{}\\\n,=]{0,80}"(,[a-z_]{1,40}="[^"{}\\\n,=]{0,80}")*\})?'
)
_NO_LOAD = Load(0, 0, 0, 0, 0, 0, 0.0)


@dataclass(slots=True)
class Worker:
    """One registered incarnation, and the totals of those before it."""

    id: WorkerId
    incarnation: Incarnation
    card: Register
    heard_at: float
    load: Load = _NO_LOAD
    progress_age_s: float = 0.0
    draining: bool = False
    drains: bool = False  # … by its own word
    drain_until: float | None = None  # it was told to drain by then
    overdue: bool = False  # … and has not left: it hangs
    ended: bool = False  # its process is known to be gone
    becomes: Role | None = None  # … and to come back as that
    came_back: bool = False  # it did, under its other id
    lost: bool = False
    counters: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    past_counters: dict[str, float] = field(default_factory=dict)
    past_histograms: dict[str, tuple[float, ...]] = field(default_factory=dict)
    longest_tokens: int = field(init=False)
    """Prompt and answer together that fit here, alone, and into a message on the way here."""

    def __post_init__(self) -> None:
        fits = min(self.card.max_model_len, self.capacity_tokens)
        self.longest_tokens = min(fits, longest_model_len(self.card.block_size))

    @property
    def role(self) -> Role:
        return self.card.role

    @property
    def capacity_tokens(self) -> int:
        return self.card.blocks_total * self.card.block_size

    @property
    def state(self) -> str:
        if self.lost:
            return "starting" if self.becomes is not None and self.left else "lost"
        return "draining" if self.draining else "ready"

    @property
    def left(self) -> bool:
        """It went as it was told to. (Who falls silent without a word of the drain hangs, as far as anybody knows.)"""
        return self.lost and self.draining and (self.drains or self.ended)

    def totals(self) -> dict[str, float]:
        """Counters over all incarnations: they never step back."""
        names = {**self.past_counters, **self.counters}
        return {n: self.past_counters.get(n, 0.0) + self.counters.get(n, 0.0) for n in names}

    def histogram_totals(self) -> dict[str, tuple[float, ...]]:
        return {
            name: _add(self.past_histograms.get(name), self.histograms.get(name))
            for name in {**self.past_histograms, **self.histograms}
        }


def _add(a: tuple[float, ...] | None, b: tuple[float, ...] | None) -> tuple[float, ...]:
    if a is None or b is None:
        return a or b or ()
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _sound(risen: Mapping[str, float], known: Mapping[str, float]) -> dict[str, float]:
    """Those that are counters by their names, as long as there are not more names than any worker of ours
    has: they are kept, and shown to whoever collects metrics."""
    sound = {n: v for n, v in risen.items() if n in known or _COUNTER.fullmatch(n)}
    new = [n for n in sound if n not in known]
    for name in new[max(0, MAX_COUNTERS - len(known)) :]:
        del sound[name]
    return sound


def _samples(row: tuple[float, ...]) -> float:
    return row[1]


class Registry:
    def __init__(
        self,
        *,
        tokenizer_hash: str | None,
        fronts: Mapping[str, str],
        vocab_size: int | None = None,
        max_model_len: int | None = None,
        heartbeat_interval_s: float = 0.5,
        lost_after_s: float = 3.0,
        hung_after_s: float = 60.0,
        max_workers: int = 4096,
    ) -> None:
        self._tokenizer_hash = tokenizer_hash
        self._vocab_size = vocab_size
        self._fronts = dict(fronts)
        self._max_model_len_asked = max_model_len
        self.heartbeat_interval_s = heartbeat_interval_s
        self._lost_after_s = lost_after_s
        self._hung_after_s = hung_after_s
        self._max_workers = max_workers
        self._workers: dict[WorkerId, Worker] = {}
        self._step_models: dict[Role, tuple[()] | tuple[float, float, float, float]] = {}  # said last
        self._looked_at: float | None = None
        self._listening_since = float("-inf")

    def set_front(self, front: str, endpoint: str) -> None:
        """Workers that register from now on send its tokens to `endpoint`."""
        self._fronts[front] = endpoint

    # ------------------------------------------------------------ what workers say

    def register(self, card: Register, sender: Sender, now: float) -> Registered | RegistrationRefused:
        worker_id = WorkerId(sender.name)
        refusal = self._refusal(card, worker_id)
        if refusal is not None:
            return refusal
        before = self._workers.get(worker_id)
        worker = Worker(worker_id, sender.incarnation, card, heard_at=now)
        if before is not None and before.incarnation == sender.incarnation:
            worker.past_counters, worker.past_histograms = before.past_counters, before.past_histograms
            worker.counters, worker.histograms, worker.load = before.counters, before.histograms, before.load
            worker.draining, worker.drain_until = before.draining, before.drain_until
            worker.drains, worker.becomes = before.drains, before.becomes
            worker.progress_age_s = before.progress_age_s
            worker.overdue = before.overdue and self._hangs(before)
        elif before is not None:
            worker.past_counters, worker.past_histograms = before.totals(), before.histogram_totals()
        self._workers[worker_id] = worker
        self._forget_long_lost()
        limit = self.max_model_len()
        assert limit is not None
        worker.lost = self._hangs(worker)  # still: it was not for its link that it was lost
        return Registered(limit, self.heartbeat_interval_s, dict(self._fronts))

    def _refusal(self, card: Register, worker_id: WorkerId) -> RegistrationRefused | None:
        theirs = card.fingerprint
        others = [
            worker for worker in self.live() if worker.id != worker_id
        ]  # its last life is over if this is taken
        if len(others) >= self._max_workers:
            return RegistrationRefused("number of workers", str(self._max_workers), "one more")
        for live in others:
            difference = first_difference(live.card.fingerprint, theirs)
            if difference is not None:
                name, our_value, their_value = difference
                return RegistrationRefused(name, str(our_value), str(their_value))
        if self._tokenizer_hash is not None and theirs.get("tokenizer") != self._tokenizer_hash:
            return RegistrationRefused("tokenizer", self._tokenizer_hash, str(theirs.get("tokenizer")))
        if self._vocab_size is not None and theirs.get("vocab_size") != self._vocab_size:
            return RegistrationRefused("vocab_size", str(self._vocab_size), str(theirs.get("vocab_size")))
        for other in others:
            if other.role != card.role and (other.card.whole_batches or card.whole_batches):
                return RegistrationRefused("batching", _batching(other.card), _batching(card))
            if other.role != card.role and not set(other.card.channels) & set(card.channels):
                return RegistrationRefused(
                    "transfer", " or ".join(other.card.channels), " or ".join(card.channels)
                )
        return None

    def heartbeat(self, message: Heartbeat, sender: Sender, now: float) -> Worker | None:
        """The sender, or None: it is not registered and must do that again."""
        worker = self.get(WorkerId(sender.name), sender.incarnation)
        if worker is None:
            return None
        worker.progress_age_s = message.progress_age_s
        if worker.lost:
            return None
        worker.heard_at = now
        worker.load = self._with_step_model(message.load, worker.role)
        worker.drains = message.draining
        worker.draining = worker.drains or worker.drain_until is not None
        # Within an incarnation they only rise, so an older heartbeat that comes late takes nothing back.
        risen = {n: max(v, worker.counters.get(n, 0.0)) for n, v in message.counters.items()}
        worker.counters = {**worker.counters, **_sound(risen, worker.counters)}
        grown = {
            name: max(row, worker.histograms.get(name, row), key=_samples)
            for name, row in message.histograms.items()
            if name in HISTOGRAM_BUCKETS and len(row) == len(HISTOGRAM_BUCKETS[name]) + 3
        }
        worker.histograms = {**worker.histograms, **grown}
        return worker

    def _with_step_model(self, load: Load, role: Role) -> Load:
        """A worker that has run too few steps to say is taken to be as fast as the last of its role that did: one
        model, and mostly one kind of machine. Without that nobody could be promised anything beside a new one."""
        if load.step_model:
            self._step_models[role] = load.step_model
            return load
        return replace(load, step_model=self._step_models.get(role, ()))

    # ------------------------------------------------------------ what the coordinator asks

    def get(self, worker_id: WorkerId, incarnation: Incarnation | None = None) -> Worker | None:
        worker = self._workers.get(worker_id)
        if worker is None or (incarnation is not None and worker.incarnation != incarnation):
            return None
        return worker

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def live(self, role: Role | None = None) -> list[Worker]:
        return [w for w in self._workers.values() if not w.lost and (role is None or w.role == role)]

    def usable(self, role: Role) -> list[Worker]:
        """Live workers that take new requests."""
        return [w for w in self._workers.values() if w.card.role == role and not (w.lost or w.draining)]

    def drain(self, worker: Worker, until: float) -> None:
        """It takes no new requests from now on. Asked again, the earlier deadline counts."""
        worker.draining = True
        worker.drain_until = until if worker.drain_until is None else min(worker.drain_until, until)

    def before_change(self, worker: Worker) -> Worker | None:
        """What `worker`, which registers, was in the other role, if that is over: ids are made so for nothing else. (A
        coordinator that was restarted meanwhile knows of no change.)"""
        before = self._workers.get(WorkerId(id_in_other_role(worker.id, worker.role)))
        return None if before is None or before.came_back or not (before.lost or before.draining) else before

    def mark_lost(self, worker: Worker) -> None:
        worker.lost = True
        worker.load = _NO_LOAD

    def expire(self, now: float) -> list[Worker]:
        """Workers found lost by now. To be called every few heartbeats.

        When it was not called for long, this process itself slept (it was stopped, or its machine was): what the
        workers said meanwhile is still unread, so everybody gets the whole time again from now on.
        """
        if self._looked_at is not None and now - self._looked_at > self._lost_after_s / 2:
            self._listening_since = now
        self._looked_at = now
        for worker in self._workers.values():
            since = worker.heard_at if worker.left else max(worker.heard_at, worker.drain_until or 0.0)
            if worker.lost and now - since > COMES_BACK_WITHIN_S:
                worker.becomes = None
        lost = [
            worker
            for worker in self.live()
            if now - max(worker.heard_at, self._listening_since) > self._lost_after_s or self._hangs(worker)
        ]
        for worker in lost:
            self.mark_lost(worker)
        return lost

    def _hangs(self, worker: Worker) -> bool:
        """Its step does, by its own word."""
        return worker.progress_age_s > self._hung_after_s

    def overdue(self, now: float) -> list[Worker]:
        """Those found by now that were to leave and did not, each once: silent since before their deadline, or longer
        after it than a step may take."""
        found = [worker for worker in self._workers.values() if self._is_overdue(worker, now)]
        for worker in found:
            worker.overdue = True
        return found

    def _may_be_overdue(self, worker: Worker) -> bool:
        return worker.drain_until is not None and not (worker.overdue or worker.ended or worker.came_back)

    def _is_overdue(self, worker: Worker, now: float) -> bool:
        if worker.drain_until is None or not self._may_be_overdue(worker):
            return False
        silent = worker.lost and not worker.drains
        return now > worker.drain_until + (0.0 if silent else self._hung_after_s)

    @property
    def awaits(self) -> bool:
        """Whether somebody may yet be found lost, overdue or not to come back."""
        return any(not w.lost or w.becomes or self._may_be_overdue(w) for w in self._workers.values())

    def max_model_len(self) -> int | None:
        """The longest prompt and answer together that fits, alone, into any live worker."""
        limits = [w.longest_tokens for w in self.live()]
        if not limits:
            return None
        asked = self._max_model_len_asked
        return min(limits) if asked is None else min(asked, *limits)

    def fingerprint(self) -> Mapping[str, Value] | None:
        live = self.live()
        return live[0].card.fingerprint if live else None

    def rows(self) -> list[dict[str, Any]]:
        """`GET /admin/workers`. Who changed its role is there once, as what it is now."""
        return [_row(worker) for worker in self._workers.values() if not worker.came_back]

    def _forget_long_lost(self) -> None:
        """Bounds the table: the oldest lost workers leave first."""
        lost = [w for w in self._workers.values() if w.lost]
        for worker in lost[: max(0, len(self._workers) - self._max_workers)]:
            del self._workers[worker.id]


def _batching(card: Register) -> str:
    return f"{'dynamic' if card.whole_batches else 'continuous'} ({card.role})"


def _row(worker: Worker) -> dict[str, Any]:
    card, load = worker.card, worker.load
    return {
        "id": worker.id,
        "role": card.role,
        "pid": card.pid,
        "host": card.host,
        "address": card.address.control,
        "state": worker.state,
        "left": worker.left,
        "overdue": worker.overdue,
        "becomes": worker.becomes,
        "running": load.running,
        "waiting": load.waiting,
        "blocks_total": card.blocks_total,
        "blocks_free": load.blocks_free,
        "blocks_held": load.blocks_held,
        "blocks_cached": load.blocks_cached,
        "block_size": card.block_size,
        "block_bytes": card.block_bytes,
        "step_ms": round(load.step_s * 1e3, 3),
        "step_model": list(load.step_model),
        "max_num_seqs": card.max_num_seqs,
        "max_num_batched_tokens": card.max_num_batched_tokens,
        "batching": "dynamic" if card.whole_batches else "continuous",
        "threads": card.threads,
        "device": card.device,
        "versions": card.versions,
        "incarnation": worker.incarnation,
    }


def name_taken(holder: Worker, sender: Sender) -> RegistrationRefused:
    return RegistrationRefused(
        "worker_id", f"{sender.name}, taken by process {holder.card.pid}", f"{sender.name} too"
    )
