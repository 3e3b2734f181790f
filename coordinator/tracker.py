"""What the coordinator knows of each request: its view of the life, the present attempt, who holds it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from common.lifecycle import Life, Phase
from common.messages import Ended, Message, Tokens
from common.ordering import Lane, due_at
from common.request import Attempt, Key, Request, RequestId, WorkerId
from coordinator.prefixes import Chain, chain_of
from coordinator.pressure import NOBODY, Coming

RECENT_LIMIT = 1024
"""Ended requests whose timeline is kept."""
TRIES_KEPT = 32
NO_ATTEMPT = Attempt(0)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from now to the first token, from there to the second (0: the same worker gives both), and what the first
    would take with nobody ahead. `plain_s`: the first, before it was corrected by how such forecasts did of late.
    `spoils_s`: by how much others, promised a time, would miss it for its sake. `local`: the plan is that a decode
    worker computes the prompt beside its batch. `coming`: of better classes, reckoned with in both."""

    ttft_s: float
    plain_s: float
    gap_s: float
    alone_s: float
    spoils_s: float = 0.0
    local: bool = False
    coming: Coming = NOBODY


@dataclass(slots=True)
class Family:
    """The choices of one prompt. The first, their leader, computes it; the others are held in the queue until its KV
    can be found, and then prefer the workers that have it."""

    held: list[RequestId] = field(default_factory=list)
    prefill: WorkerId | None = None  # where the KV is, once it is
    decode: WorkerId | None = None
    moved_at: float = 0.0  # when the others were let go, or one of them last ended: they may come in waves


@dataclass(slots=True)
class Try:
    """One attempt: who had it, and what went wrong with it, if anything did."""

    attempt: Attempt
    prefill: WorkerId | None
    decode: WorkerId | None
    fault: str = ""


@dataclass(slots=True)
class Tracked:
    """One request. `outputs` is what the front has accepted: where a next attempt starts."""

    request: Request
    arrival: int
    life: Life
    deadline: float | None  # of its first token, until that is out
    due: float = float("inf")  # when its first token should be out: what the order goes by
    lane: Lane = (0, "", "")  # in the queue
    attempt: Attempt = NO_ATTEMPT  # set while dispatched
    attempts: int = 0
    fruitless: int = 0  # attempts in a row that brought no token
    deaths: int = 0
    outputs: list[int] = field(default_factory=list)
    prefill: WorkerId | None = None
    decode: WorkerId | None = None
    command: Message | None = None  # the dispatch, until a worker has answered it
    ask_at: float = 0.0
    asks: int = 0
    dispatched_at: float = 0.0
    passes: int = 0  # dispatches from behind it since it has stood in the queue
    seen_at: float = 0.0  # last proof that somebody holds the present attempt
    block_size: int = 1  # of the pair that has it; the fingerprint makes them equal
    prompt_done: bool = False
    handed_over: bool = False
    avoid: set[WorkerId] = field(default_factory=set)
    ends: list[tuple[WorkerId, Ended]] = field(default_factory=list)
    lost_tokens: dict[Attempt, int] = field(default_factory=dict)  # counted as thrown away, by attempt
    last_fault: str = ""
    tries: list[Try] = field(default_factory=list)
    family: Family | None = None
    chain: Chain = ()  # hashes of its prompt's beginning
    submitted_at: float = 0.0
    forecast: Forecast | None = None  # of its first token, until that comes
    first_token_at: float = 0.0
    choices: tuple[RequestId, ...] = ()  # of the first of a group: those that came with it
    prompt_tokens: int = 0  # of an ended one, like the next: its ids are gone
    output_tokens: int = 0

    @property
    def id(self) -> RequestId:
        return self.request.request_id

    @property
    def key(self) -> Key:
        return (self.request.request_id, self.attempt)

    @property
    def holders(self) -> list[WorkerId]:
        """Workers that may hold the present attempt."""
        return list(dict.fromkeys(w for w in (self.prefill, self.decode) if w is not None))

    @property
    def plan(self) -> bool | None:
        """Whether a decode worker was to compute its prompt beside its batch; None where nothing was forecast."""
        return None if self.forecast is None else self.forecast.local

    def tried(self) -> None:
        """The present attempt goes out to the present pair."""
        self.tries.append(Try(self.attempt, self.prefill, self.decode))
        del self.tries[:-TRIES_KEPT]

    def went_wrong(self, why: str) -> None:
        self.last_fault = why
        if self.tries and self.tries[-1].attempt == self.attempt:
            self.tries[-1].fault = why

    @property
    def tokens(self) -> int:
        """Prompt and accepted output: what a next attempt prefills."""
        return self.request.prompt_tokens + len(self.outputs)

    def to_compute(self, worker: WorkerId, block_size: int) -> int:
        """What is left of these at a worker where a follower finds the whole blocks of its family's prompt."""
        family = self.family
        if family is None or not self.request.follows or worker not in (family.prefill, family.decode):
            return self.tokens
        return self.tokens - (self.request.prompt_tokens - 1) // block_size * block_size


class Tracker:
    """Live requests by id, and a bounded memory of ended ones for `/admin/requests/{id}`."""

    def __init__(self) -> None:
        self._live: dict[RequestId, Tracked] = {}
        self._out: dict[RequestId, Tracked] = {}  # those of them that workers have
        self._recent: dict[RequestId, Tracked] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._live)

    def new(self, request: Request, deadline: float | None, now: float) -> Tracked:
        self._arrivals += 1
        due = due_at(request, now)
        due = due if deadline is None else min(due, deadline)
        tracked = Tracked(request, self._arrivals, Life(Phase.WAITING, now), deadline, due, seen_at=now)
        tracked.chain, tracked.submitted_at = chain_of(request), now
        self._live[tracked.id] = tracked
        return tracked

    def get(self, request_id: RequestId) -> Tracked | None:
        return self._live.get(request_id)

    def present(self, key: Key) -> Tracked | None:
        """The live request whose present attempt is `key`."""
        tracked = self._live.get(key[0])
        return tracked if tracked is not None and tracked.attempt == key[1] else None

    def may_come_from(self, worker: WorkerId, key: Key) -> bool:
        """Whether tokens of this attempt are its holder's. What earlier attempts still say the present one says too; of
        who is not live nobody takes anything."""
        tracked = self._live.get(key[0])
        return tracked is None or (tracked.attempt == key[1] and worker in (tracked.prefill, tracked.decode))

    def of_holder(self, tokens: Tokens, worker: WorkerId, now: float) -> tuple[Tokens, int, list[Tracked]]:
        """Without what is not this worker's to say, how many rows that was, and whose first word this is though their
        deadline has passed: in nearly every message none."""
        live = self._live
        for row in tokens.rows:
            tracked = live.get(row.id)
            if tracked is not None and (
                tracked.attempt != row.attempt
                or (worker != tracked.decode and worker != tracked.prefill)
                or (tracked.deadline is not None and now >= tracked.deadline)
            ):
                break
        else:
            if not tokens.prompts:
                return tokens, 0, []
        rows = tuple(r for r in tokens.rows if self.may_come_from(worker, (r.id, r.attempt)))
        prompts = tuple(r for r in tokens.prompts if self.may_come_from(worker, (r.id, r.attempt)))
        dropped = len(tokens.rows) - len(rows) + len(tokens.prompts) - len(prompts)
        speaking = dict.fromkeys([r.id for r in rows] + [r.id for r in prompts])
        said = [live.get(request_id) for request_id in speaking]
        late = [t for t in said if t is not None and t.deadline is not None and now >= t.deadline]
        return Tokens(tokens.seq, rows, prompts), dropped, late

    def all(self) -> list[Tracked]:
        return list(self._live.values())

    def dispatched(self) -> list[Tracked]:
        """Those that workers have: never more than those hold, however many wait."""
        return list(self._out.values())

    def goes_out(self, tracked: Tracked) -> None:
        """It is given to workers."""
        self._out[tracked.id] = tracked

    def comes_back(self, tracked: Tracked) -> None:
        """No worker has it any more. Idempotent."""
        self._out.pop(tracked.id, None)

    def end(self, tracked: Tracked) -> None:
        """Moves it to the memory of ended ones, which keeps numbers, not prompts: a thousand of those are large."""
        del self._live[tracked.id]
        self.comes_back(tracked)
        tracked.prompt_tokens, tracked.output_tokens = tracked.request.prompt_tokens, len(tracked.outputs)
        tracked.family = None
        tracked.request = replace(tracked.request, prompt_ids=b"")
        tracked.outputs = []
        self._recent[tracked.id] = tracked
        if len(self._recent) > RECENT_LIMIT:
            del self._recent[next(iter(self._recent))]

    def known(self, request_id: RequestId) -> Tracked | None:
        """Live, or ended a while ago."""
        return self._live.get(request_id) or self._recent.get(request_id)

    def remember_end(self, worker: WorkerId, ended: Ended) -> None:
        """A worker's account of its part, also when it comes after the request's end."""
        tracked = self.known(ended.id)
        if tracked is not None and ended.outcome != "unknown" and (worker, ended) not in tracked.ends:
            tracked.ends.append((worker, ended))
            del tracked.ends[: -2 * TRIES_KEPT]

    def queue_wait(self, request_id: RequestId, now: float) -> tuple[str, float] | None:
        """A request's tier and its seconds in the queue, all visits together."""
        tracked = self._live.get(request_id) or self._recent.get(request_id)
        return (
            None if tracked is None else (tracked.request.tier, tracked.life.seconds_in(Phase.WAITING, now))
        )

    def timeline(self, request_id: RequestId, now: float) -> dict[str, Any] | None:
        tracked = self.known(request_id)
        return None if tracked is None else _timeline(tracked, now)


def _timeline(t: Tracked, now: float) -> dict[str, Any]:
    """Durations are each taken inside one process; what lies between two processes shows in neither."""
    done = [ended for _, ended in t.ends]
    here_s = t.life.durations_s(now)
    seconds = sum(here_s.values())
    accounted_s = here_s.get(Phase.WAITING, 0.0) + _at_workers_s(t)
    return {
        "id": t.id,
        "phase": str(t.life.phase),
        "choices": list(t.choices),
        "attempts": t.attempts,
        "prompt_tokens": t.request.prompt_tokens or t.prompt_tokens,
        "output_tokens": len(t.outputs) or t.output_tokens,
        "prefill_worker": t.prefill,
        "decode_worker": t.decode,
        "seconds": round(seconds, 6),
        "coordinator_seconds": _rounded(here_s),
        "unattributed_seconds": round(max(0.0, seconds - accounted_s), 6),
        "workers": [
            {
                "worker": worker,
                "attempt": str(ended.attempt),  # above 2^53, which readers that know only doubles would round
                "outcome": ended.outcome,
                "reason": ended.reason,
                "seconds": _rounded(ended.durations_s),
                "cached_tokens": ended.cached_tokens,
                "blocks": ended.blocks,
                "transferred_bytes": ended.transferred_bytes,
            }
            for worker, ended in t.ends
        ],
        "blocks": max((e.blocks for e in done), default=0),
        "transferred_bytes": sum(e.transferred_bytes for e in done),
        "cached_tokens": max((e.cached_tokens for e in done), default=0),
        "last_fault": t.last_fault,
        "tries": [
            {
                "number": number,
                "attempt": str(one.attempt),
                "prefill_worker": one.prefill,
                "decode_worker": one.decode,
                "fault": one.fault,
            }
            for number, one in enumerate(t.tries, t.attempts - len(t.tries) + 1)
        ],
    }


def _at_workers_s(t: Tracked) -> float:
    """What workers say of their parts, no second twice: while a decode worker waits for a transfer (its `kv_ready`),
    the prefill worker computes and sends, and says so."""
    prefill_of = {one.attempt: one.prefill for one in t.tries}
    total_s = 0.0
    for worker, ended in t.ends:
        total_s += sum(ended.durations_s.values())
        if prefill_of.get(ended.attempt) not in (None, worker):
            total_s -= ended.durations_s.get(Phase.KV_READY, 0.0)
    return total_s


def _rounded(durations_s: dict[str, float]) -> dict[str, float]:
    return {phase: round(seconds, 6) for phase, seconds in durations_s.items()}
