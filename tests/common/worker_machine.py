"""What the state machines of both kinds of worker share: requests, commands in any order, steps, and what must hold.

A history gives commands that are doubled, stale or unknown, lets steps finish late, ends requests while their step is
out, and says whatever a peer may say, at any time. The virtual model checks every block that a step reads.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bench.virtual_model import NO_TOKEN, continuation, prompt_scores
from common.batching import Batch, BatchingCore, RowResult
from common.effects import Effect, ToCoordinator, ToFront
from common.messages import (
    Abort,
    AboutRequest,
    Accepted,
    Ended,
    Later,
    Message,
    Refused,
    Stop,
    TokenRow,
    Tokens,
)
from common.request import Attempt, Key, Request, WorkerId, pack_ids
from common.sequence import Sequence
from tests.common.stepping import COORDINATOR, check_whole, make_core, model_for, prompt, request
from transfer.pure_worker import PureWorker

POOL = 20
SLOTS = 3
CHUNK = 8
P, Q = WorkerId("prefill-0"), WorkerId("prefill-1")

_SHAPES = ((3, 1), (10, 9), (21, 12), (33, 30), (44, 30), (33, 5), (14, 50), (90, 4))
"""Prompt and answer lengths; most prompts begin alike, and the last never fits."""


def _make(number: int) -> Request:
    length, out = _SHAPES[number]
    made = request(f"r{number}", prompt(length, 500 if number == 6 else 100), out, priority=number % 2)
    if number == 5:
        return replace(made, sampling=replace(made.sampling, prompt_logprobs=0))
    return made


REQUESTS = tuple(_make(number) for number in range(len(_SHAPES)))
numbers = st.integers(0, len(REQUESTS) - 1)
steps_ahead = st.sampled_from((-1, 0, 0, 0, 1, 1, 2))
"""An attempt by the newest of its request: stale, the same again, or a later one."""


def ids_of(wanted: Request) -> list[int]:
    return prompt(wanted.prompt_tokens, 500 if wanted.request_id == "r6" else 100)


def outputs_before(wanted: Request, attempt: int) -> list[int]:
    """What the front has accepted when this attempt begins: a token for each attempt before it, and two are left."""
    return continuation(ids_of(wanted), max(0, min(attempt - 1, wanted.sampling.max_tokens - 2)))


def packed_before(wanted: Request, attempt: int) -> bytes:
    return pack_ids(outputs_before(wanted, attempt))


@dataclass(slots=True)
class Step:
    """A batch that is out, and the blocks that it reads and writes. `early`: what it came to, if the model ran it."""

    batch: Batch
    read: set[int]
    early: Seq[RowResult] | None = None


class WorkerMachine(RuleBasedStateMachine):
    """Subclasses make the worker, add commands and peers, and say how honest peers let everything end."""

    worker: PureWorker
    max_inflight = 1

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.core: BatchingCore = make_core(POOL, max_num_seqs=SLOTS, chunk=CHUNK)
        self.model = model_for(self.core)
        self.steps: list[Step] = []  # that are out, oldest first
        self.ends: dict[Key, Ended] = {}
        self.newest = [1] * len(REQUESTS)

    @property
    def out(self) -> Batch | None:
        """The next one to come back."""
        return self.steps[0].batch if self.steps else None

    # ------------------------------------------------------------ of the one or the other kind

    def sequences(self) -> list[Sequence]:
        raise NotImplementedError

    def peers(self, effect: Effect) -> None:
        """An effect that is not for the coordinator or a front."""
        raise NotImplementedError

    # ------------------------------------------------------------ commands

    def key(self, number: int, ahead: int) -> Key:
        attempt = max(1, self.newest[number] + ahead)
        self.newest[number] = max(self.newest[number], attempt)
        return REQUESTS[number].request_id, Attempt(attempt)

    def hear(self, message: Message, sender: WorkerId = COORDINATOR) -> list[Effect]:
        """Handled, carried out, and followed by a turn, as the loop does it. What was said at once."""
        effects = self.worker.handle(message, sender, self.now)
        self.carry(effects)
        self.turn()
        return effects

    def command(self, message: AboutRequest) -> None:
        """The coordinator's commands are all answered, at once."""
        answers = [e.message for e in self.hear(message) if isinstance(e, ToCoordinator)]
        kinds = (Accepted, Later, Refused, Ended)
        assert any(isinstance(m, kinds) and m.key == message.key for m in answers), (
            f"{message} is not answered"
        )

    @rule(number=numbers, ahead=steps_ahead)
    def abort(self, number: int, ahead: int) -> None:
        self.command(Abort(*self.key(number, ahead), "client left"))

    @rule(number=numbers, ahead=steps_ahead)
    def stop(self, number: int, ahead: int) -> None:
        self.command(Stop(*self.key(number, ahead)))

    @precondition(lambda self: self.worker.live_keys())
    @rule(which=st.integers(0, 9), ours=st.booleans())
    def live_one_is_not_wanted(self, which: int, ours: bool) -> None:
        """By the answer to a heartbeat, or because we erred over it."""
        live = self.worker.live_keys()
        key = live[which % len(live)]
        if ours:
            self.carry(self.worker.fail(key, ValueError("a fault"), self.now))
        else:
            self.carry(self.worker.abort(key, "not wanted", self.now))
        assert key not in self.worker.live_keys()
        self.turn()

    @precondition(lambda self: self.now > 3.0)
    @rule()
    def drain(self) -> None:
        self.worker.draining = True

    # ------------------------------------------------------------ steps and time

    @rule(seconds=st.sampled_from((0.01, 0.3, 1.1, 6.0, 50.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.turn()

    @rule(early=st.booleans())
    def step_begins(self, early: bool) -> None:
        """`early`: the model has written its blocks before anything else happens, else only when it is back."""
        if len(self.steps) < self.max_inflight:
            batch = self.worker.schedule(self.now)
            if batch is not None:
                self.check_batch(batch)
                self.steps.append(Step(batch, {block for seq in batch.rows for block in seq.blocks}))
                if early:
                    self.results(len(self.steps))
            self.turn()

    def results(self, steps: int) -> Seq[RowResult]:
        """Runs the oldest of those that are out, in their order. What the last of them came to."""
        for step in self.steps[:steps]:
            step.early = step.early or self.model.run(step.batch)
        assert step.early is not None
        return step.early

    @precondition(lambda self: self.out is not None)
    @rule()
    def step_is_back(self) -> None:
        self.finish()

    @precondition(lambda self: self.out is not None)
    @rule(row=st.integers(0, 9))
    def step_is_back_and_a_row_raised(self, row: int) -> None:
        assert self.out is not None
        results = list(self.results(1))
        row %= len(self.out.rows)
        results[row] = NO_TOKEN
        self.carry(self.worker.fail_row(self.out.rows[row], "it raised", self.now))
        self.finish(results)

    def finish(self, results: Seq[RowResult] | None = None) -> None:
        assert self.out is not None
        results = results or self.results(1)
        batch = self.steps.pop(0).batch
        self.carry(self.worker.finish(batch, results, 0.1, self.now))
        self.turn()

    def step(self) -> None:
        """A whole one, beside as many others as may be out."""
        for _ in range(self.max_inflight):
            self.step_begins(False)
        if self.out is not None:
            self.finish()

    def turn(self) -> None:
        self.carry(self.worker.turn(self.now))

    # ------------------------------------------------------------ what is said

    def carry(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ToCoordinator(message):
                    if isinstance(message, Ended) and message.outcome != "unknown":
                        before = self.ends.setdefault(message.key, message)
                        assert before == message, "one end, and a later word only repeats it"
                case ToFront(_, Tokens() as tokens):
                    self.check_tokens(tokens)
                case _:
                    self.peers(effect)

    def check_tokens(self, tokens: Tokens) -> None:
        for row in tokens.rows:
            self.check_row(row)
        for prompt_row in tokens.prompts:
            ids = ids_of(REQUESTS[int(prompt_row.id[1:])])
            end = prompt_row.first + len(prompt_row.logprobs)
            assert prompt_row.logprobs == prompt_scores(ids, prompt_row.first, end)

    def check_row(self, row: TokenRow) -> None:
        wanted = REQUESTS[int(row.id[1:])]
        right = continuation(ids_of(wanted), wanted.sampling.max_tokens)
        assert list(row.ids) == right[row.first : row.first + len(row.ids)], (
            "a wrong token, or a place missed"
        )
        assert (row.finish == "length") == (row.first + len(row.ids) == len(right))

    # ------------------------------------------------------------ what holds always

    def check_batch(self, batch: Batch) -> None:
        assert len(batch.rows) <= SLOTS
        assert batch.num_tokens <= self.budget(batch), "the step's budget is exceeded"
        at = 0
        for seq, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
            before = [step.batch for step in self.steps if seq in step.batch.rows]
            covered = len(seq.blocks) * self.core.block_size
            assert covered >= len(seq.tokens) + len(before), "a prompt runs without room for the whole of it"
            token, at = batch.token_ids[at], at + count
            assert (token < 0) == bool(before) <= batch.ahead, "who is out stands for what is to come"
            if before:
                place = before[0].rows.index(seq)
                assert token == -1 - place and start == before[0].starts[place] + before[0].counts[place]
                assert count == 1 and len(seq.tokens) + 1 < seq.max_len, "it ends by its length before that"
            else:
                assert start == seq.num_computed and 0 < count <= seq.left

    def budget(self, batch: Batch) -> int:
        return self.core.max_num_batched_tokens

    @invariant()
    def adds_up(self) -> None:
        self.core.pool.check()
        out = [seq for step in self.steps for seq in step.batch.rows]
        holders = {id(seq): seq for seq in (*self.sequences(), *out)}.values()
        held = [block for seq in holders for block in seq.blocks]
        assert self.core.pool.held == len(set(held)), "a block without an owner"
        for block in held:
            assert self.core.pool._holders[block] == held.count(block), (
                "an owner more or less than is counted"
            )
        slots = [seq.slot for seq in holders if seq.slot >= 0]
        assert len(set(slots)) == len(slots) and len(slots) + self.core.free_slots == SLOTS
        assert set().union(*(step.read for step in self.steps)) <= set(held), "freed under a step"
        for seq in holders:
            assert seq.in_batch == sum(seq in step.batch.rows for step in self.steps)

    @invariant()
    def one_attempt_of_each(self) -> None:
        live = self.worker.live_keys()
        assert len({request_id for request_id, _ in live}) == len(live)
        assert not set(live) & set(self.ends), "ended, and still here"

    @invariant()
    def tables_are_bounded(self) -> None:
        assert len(self.worker.live_keys()) <= len(REQUESTS)

    def check_over(self) -> None:
        assert self.worker.idle, f"still here: {self.worker.live_keys()}"
        check_whole(self.core)
