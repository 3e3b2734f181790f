"""Gives waiting requests to pairs of workers, and keeps account of what that takes of them. Pure.

The rule of the queue: in order, and one without room lets a few behind it pass, so that a long prompt does not
idle the pools; but not more than MAX_PASSES in all, so that it does not wait for ever. One that no worker that is left
could hold is passed by all: room made for it would be of no use. So is a prompt longer than a step while every worker
has such a one before it: who passes it takes nothing of what it waits for (see `router.py`), and it is next when that
one is done. One that was promised its first token within a time is passed by nobody else: what was forecast for it is
what is before it. A dispatch is a command, said again by the cluster until a worker has answered it.

Why no deadlock: a request waits here before it counts at any worker, and is given to both of a pair at once or to
none; a follower is held only for its leader, which is never held. Shares are given back when a prompt is computed, when
an attempt is taken back and when a request ends, never by a message from a worker that may have died. The account is
there for order, not for safety: workers must not hang if it is wrong. The whole picture: `common/lifecycle.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import islice

from common.effects import Effect, ToWorker
from common.lifecycle import Phase
from common.messages import Decode, Message, Prefill, Rebind
from common.request import Attempt, Request, pack_ids
from common.shares import IN_COST, OUT_COST
from coordinator.lanes import Entry, Rank
from coordinator.placing import Placing
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry, Worker
from coordinator.router import Router
from coordinator.tracker import NO_ATTEMPT, Family, Tracked, Tracker

MAX_PASSES = 64
LOOK_AHEAD = 32  # entries of the queue that are looked at in one go …
MAX_BLOCKED = 8  # … as long as no more than these found no room
MAX_LONG_PASSED = 256  # of prompts that wait for another long one to be done, in one go


class Dispatcher:
    """`room_made`: since the queue was last walked; nothing else makes walking it worth while."""

    def __init__(
        self,
        registry: Registry,
        queue: WaitingQueue,
        tracker: Tracker,
        router: Router,
        placing: Placing,
        *,
        first_attempt: Attempt,
        ask_again_s: float,
    ) -> None:
        self._registry = registry
        self._queue = queue
        self._tracker = tracker
        self._router = router
        self._placing = placing
        self._attempt = first_attempt
        self._ask_again_s = ask_again_s
        self.room_made = True
        self._wall: Rank | None = None
        """Where the last walk stopped because too many had no room: nobody behind it is looked at."""
        self._full = False  # it found every batch full: nobody is looked at until room is made

    @property
    def idle(self) -> bool:
        """Nobody takes a share of any worker."""
        return self._router.empty

    # ------------------------------------------------------------ the queue

    def enqueue(self, tracked: Tracked, now: float) -> None:
        entry = self._entry(tracked, now)
        self._queue.push(entry)
        if not tracked.attempts:
            self._placing.comes(tracked, now)
        if self._full:
            return
        rank = None if self._wall is None else self._queue.rank(entry, MAX_BLOCKED)
        if self._wall is None or (rank is not None and rank < self._wall):
            self.room_made = True

    def hold(self, tracked: Tracked, family: Family, now: float) -> None:
        """A follower waits until its family is let go."""
        tracked.family = family
        family.held.append(tracked.id)
        self._queue.hold(self._entry(tracked, now))

    def let_go(self, family: Family, now: float) -> bool:
        """Whoever of it is held stands in line now; whether there was one."""
        held, family.held = family.held, []
        freed = [request_id for request_id in held if self._queue.let_go(request_id)]
        if freed:
            family.moved_at = now
            self.room_made = True
        return bool(freed)

    def _entry(self, tracked: Tracked, now: float) -> Entry:
        request, policy = tracked.request, self._queue.policy
        tokens = 1 if request.follows else tracked.tokens
        tracked.lane = policy.lane(request)
        return Entry(
            tracked.id,
            tracked.lane,
            policy.place(tracked.due, tracked.arrival),
            tokens,
            since=now,
            longest=request.max_total_tokens,
            cost=IN_COST * tokens / request.weight if tracked.attempts == 0 else 0.0,
            tier=request.tier,
        )

    def served(self, tracked: Tracked, num_tokens: int) -> None:
        """So many answer tokens came."""
        self._queue.shares.charge(tracked.lane, OUT_COST * num_tokens / tracked.request.weight)

    def give_out(self, now: float) -> list[Effect]:
        """Gives out what workers have room for."""
        effects: list[Effect] = []
        while self.room_made and not self._queue.empty:
            self._full = self._placing.full
            if self._full:
                self.room_made = False
                break
            effects += self._walk_queue(now)
        return effects

    def retry_after_s(self) -> float:
        """How long until what waits now should be through: tokens ahead over the pool's present rate."""
        workers = self._registry.usable("prefill") or self._registry.usable("decode")
        rate = sum(w.card.max_num_batched_tokens / max(w.load.step_s, 0.05) for w in workers)
        return min(60.0, max(1.0, self._queue.tokens / max(rate, 1.0)))

    def _walk_queue(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        passed: list[Tracked] = []
        given: list[Entry] = []
        looked_at = 0
        self._wall = None
        with closing(self._queue.in_order(self._wanted(), now)) as order:
            for rank, entry in islice(order, LOOK_AHEAD):
                looked_at += 1
                tracked = self._tracker.get(entry.id)
                assert tracked is not None
                pair = self._placing.pick(tracked, now, len(self._queue))
                if pair is None:
                    passed.append(tracked)
                    if len(passed) > MAX_BLOCKED:
                        self._wall = rank
                        break
                    continue
                if not all(map(_may_be_passed, passed)):
                    break
                given.append(entry)
                effects += self._dispatch(tracked, *pair, now)
                for blocked in passed:
                    blocked.passes += 1
                self._full = self._placing.full
                if self._full:
                    break
        for entry in given:
            self._queue.give_out(entry, now)
        # There may be more, and room for it.
        self.room_made = not self._full and not passed and looked_at == LOOK_AHEAD
        return effects

    def _wanted(self) -> Callable[[Entry], bool]:
        """Whether an entry could be given out when room is made, as far as the workers that are left go."""
        deciders = self._registry.usable("decode")
        room = max((worker.longest_tokens for worker in deciders), default=0)
        computers = self._registry.usable("prefill") or deciders
        computers = computers + [w for w in deciders if w not in computers and self._placing.may_be_local(w)]
        step_tokens = max((worker.card.max_num_batched_tokens for worker in computers), default=0)
        waits: dict[int, int] = {}  # class → the least tokens known to wait for a long one
        passed = 0

        def wanted(entry: Entry) -> bool:
            nonlocal passed
            if entry.longest > room:
                return False
            if entry.tokens <= step_tokens or passed == MAX_LONG_PASSED:
                return True
            number, tokens = entry.lane[0], entry.tokens
            if tokens < waits.get(number, tokens + 1):  # who has more waits as well
                if not all(self._router.has_long(worker, tokens, number) for worker in computers):
                    return True
                waits[number] = tokens
            passed += 1
            return False

        return wanted

    # ------------------------------------------------------------ one request

    def command(self, tracked: Tracked, command: Message, now: float) -> list[Effect]:
        """Sends a command to the one that computes the prompt; it is said again until answered."""
        tracked.command = command
        tracked.asks = 1
        tracked.ask_at = now + self._ask_again_s
        return [ToWorker(tracked.holders[0], command)]

    def rebind(self, tracked: Tracked, now: float) -> list[Effect] | None:
        """Another decode worker for a prompt that its prefill worker still holds; None when there is no other."""
        lost = tracked.decode
        target = self._placing.pick_other(tracked, now)
        if target is None or target.id == lost or tracked.prefill is None:
            return None
        self.room_made = True
        self._router.release(tracked.id, None, lost)
        self._router.assign(tracked.id, None, target.id, self._placing.share(tracked, None, target), now)
        tracked.decode = tracked.tries[-1].decode = target.id
        tracked.seen_at = now
        address = target.card.address
        if isinstance(tracked.command, Prefill):  # not answered yet: ask with the new target
            outputs = tracked.command.output_ids
            return self.command(tracked, Prefill(*tracked.key, _as_sent(tracked, now), outputs, address), now)
        return self.command(tracked, Rebind(*tracked.key, address), now)

    def prompt_done(self, tracked: Tracked, now: float) -> None:
        """Its prompt is computed: it is no longer ahead of anybody."""
        self.room_made = True
        self._router.computed(tracked.id, tracked.prefill or tracked.decode, now)

    def release(self, tracked: Tracked) -> None:
        """It takes no share of its workers any more."""
        self.room_made = True
        self._router.release(tracked.id, tracked.prefill or tracked.decode, tracked.decode)
        tracked.command = None

    def take_back(self, tracked: Tracked) -> None:
        """Its present attempt is over, the next one not dispatched."""
        self.release(tracked)
        self._tracker.comes_back(tracked)
        tracked.prefill = tracked.decode = None
        tracked.attempt = NO_ATTEMPT

    # ------------------------------------------------------------ inside

    def _dispatch(self, tracked: Tracked, prefill: Worker | None, decode: Worker, now: float) -> list[Effect]:
        self._attempt = Attempt(self._attempt + 1)
        tracked.attempt = self._attempt
        tracked.attempts += 1
        tracked.prefill = prefill.id if prefill is not None else None
        tracked.decode = decode.id
        tracked.block_size = decode.card.block_size
        tracked.handed_over = tracked.prompt_done = False
        tracked.tried()
        tracked.passes = 0
        tracked.seen_at = tracked.dispatched_at = now
        tracked.life.move(Phase.QUEUED, now)
        self._tracker.goes_out(tracked)
        computer = prefill or decode
        share = self._placing.share(tracked, prefill, decode)
        self._router.assign(tracked.id, computer.id, decode.id, share, now)
        outputs, request = pack_ids(tracked.outputs), _as_sent(tracked, now)
        if prefill is None:
            return self.command(tracked, Decode(*tracked.key, request, outputs), now)
        return self.command(tracked, Prefill(*tracked.key, request, outputs, decode.card.address), now)


def _may_be_passed(tracked: Tracked) -> bool:
    return tracked.forecast is None and tracked.passes < MAX_PASSES


def _as_sent(tracked: Tracked, now: float) -> Request:
    """The request with what is left of its time."""
    if tracked.due == float("inf"):
        return tracked.request
    return replace(tracked.request, deadline_s=max(0.0, tracked.due - now))
