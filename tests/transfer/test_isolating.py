"""A step that raises: its rows are tried alone, the guilty one is named, the others lose nothing; with two steps out
nobody is given what the device made of a step that raised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from common.batching import Batch
from kernels.step import TokenLogprob
from transfer.isolating import NO_TOKEN, IsolatingSteps
from transfer.pure_worker import Results

POISON, OVERFLOW = 666, 667
RUBBISH = 500_000


@dataclass(frozen=True, slots=True)
class Result:
    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[None, ...]
    prompts: Mapping[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    faults: Mapping[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class Coming:
    device: Device
    value: Result | None

    def result(self) -> Result:
        self.device.out -= 1
        if self.value is None:
            raise RuntimeError("boom")
        return self.value

    def discard(self) -> None:
        self.device.out -= 1


class Device:
    """Raises over one token, at launch or when it is waited for, and then has rubbish in place of what it drew;
    overflows on another. The next token of the rest is their last one and one more. Tells of a prompt what its last
    token is."""

    def __init__(self, late: bool = False) -> None:
        self.late = late
        self.out = self.most_out = 0
        self.launched: list[list[int]] = []
        self.changes: list[int] = []
        self._newest: list[int] = []

    def launch(self, batch: Batch) -> Coming:
        self.launched.append(list(batch.token_ids))
        self.changes += [*batch.left, *(joined.slot for joined in batch.joined), *(s for s, _ in batch.grown)]
        lasts, first = [], 0
        for count in batch.counts:
            first += count
            last = batch.token_ids[first - 1]
            lasts.append(self._newest[-1 - last] if last < 0 else last)
        self._newest = [last + 1 for last in lasts]
        value: Result | None = None
        if POISON in lasts:
            self._newest = [RUBBISH] * len(lasts)
            if not self.late:
                raise RuntimeError("boom")
        else:
            value = self._result(lasts)
        self.out += 1
        self.most_out = max(self.most_out, self.out)
        return Coming(self, value)

    def _result(self, lasts: list[int]) -> Result:
        faults = {row: "overflow" for row, last in enumerate(lasts) if last == OVERFLOW}
        ids = tuple(() if row in faults else (last + 1,) for row, last in enumerate(lasts))
        prompts = {
            row: (TokenLogprob(last, -float(last), ()),) for row, last in enumerate(lasts) if last < 500
        }
        return Result(ids, (None,) * len(ids), prompts, faults)


def batch_of(*lasts: int, **changes: Any) -> Batch:
    """Rows of one token, or of three that end in a prompt's; below 0: that row of the batch before."""
    batch = Batch(ahead=any(last < 0 for last in lasts), **changes)
    for slot, last in enumerate(lasts):
        tokens = [last] if last < 0 or slot % 2 else [1, 2, last]
        batch.slots.append(slot)
        batch.starts.append(0)
        batch.counts.append(len(tokens))
        batch.samples.append(True)
        batch.token_ids += tokens
        batch.rows.append(SimpleNamespace(key=(f"r{slot}", 1)))  # type: ignore[arg-type]
    return batch


def ids_of(results: Results) -> list[tuple[int, ...]]:
    return [row.ids for row in results[0]]


def test_a_step_that_does_not_raise_runs_once() -> None:
    device = Device()
    results = IsolatingSteps(device).run(batch_of(10, 20))
    assert ids_of(results) == [(11,), (21,)] and results[1] == {}
    assert len(device.launched) == 1 and device.out == 0


@pytest.mark.parametrize("late", [False, True])
def test_the_guilty_row_is_named_and_the_others_go_on(late: bool) -> None:
    device = Device(late)
    rows, failed = IsolatingSteps(device).run(batch_of(10, POISON, 30, grown=[(7, [1])]))
    assert [row.ids for row in rows] == [(11,), (), (31,)]
    assert [[one.chosen for one in row.prompt_logprobs] for row in rows] == [[-10.0], [], [-30.0]]
    assert list(failed) == [1] and "RuntimeError" in failed[1]
    assert device.launched[1:] == [[1, 2, 10], [POISON], [1, 2, 30]] and device.changes == [7]
    assert device.out == 0


def test_a_row_that_overflows_is_named_without_running_anything_again() -> None:
    device = Device()
    results = IsolatingSteps(device).run(batch_of(10, OVERFLOW))
    assert ids_of(results) == [(11,), ()] and results[1] == {1: "overflow"} and len(device.launched) == 1


@pytest.mark.parametrize("late", [False, True])
def test_an_overflow_beside_a_poisoned_row_is_found_too(late: bool) -> None:
    results = IsolatingSteps(Device(late)).run(batch_of(POISON, OVERFLOW, 30))
    assert ids_of(results) == [(), (), (31,)] and sorted(results[1]) == [0, 1]


# ---------------------------------------------------------------- two steps out


def in_turns(device: Device, *batches: Batch) -> list[Results]:
    """Each is launched before the one before it is waited for."""
    steps = IsolatingSteps(device)
    said: list[Results] = []
    coming = steps.launch(batches[0])
    for batch in batches[1:]:
        following = steps.launch(batch)
        said.append(coming())
        coming = following
    said.append(coming())
    assert device.out == 0, "all that was launched was waited for"
    return said


def test_what_does_not_raise_goes_ahead() -> None:
    device = Device()
    said = in_turns(device, batch_of(10, 20), batch_of(-2, -1), batch_of(-1, -2, 70))
    assert [ids_of(one) for one in said] == [[(11,), (21,)], [(22,), (12,)], [(23,), (13,), (71,)]]
    assert device.most_out == 2 and len(device.launched) == 3


@pytest.mark.parametrize("late", [False, True])
def test_story_of_a_step_that_raised_under_another(late: bool) -> None:
    """1 a row of the first raises  2 the second was launched behind it: who followed that row has no token, the others
    those of the first  3 so has the third, launched before the second was waited for  4 the fifth goes ahead again."""
    device = Device(late)
    said = in_turns(
        device,
        batch_of(10, POISON, 30),
        batch_of(-1, -2, -3, grown=[(7, [1])]),
        batch_of(-3, -1, 50, left=[8]),
        batch_of(-1, -2, -3),
        batch_of(-2, -1),
    )
    assert [ids_of(one) for one in said] == [
        [(11,), (), (31,)],
        [(12,), (), (32,)],
        [(33,), (13,), (51,)],
        [(34,), (14,), (52,)],
        [(15,), (35,)],
    ]
    assert [sorted(failed) for _, failed in said] == [[1], [1], [], [], []] and said[1][1] == {1: NO_TOKEN}
    assert device.launched[-1] == [-2, -1], "the device knows its tokens again"
    assert device.changes == [7, 8], "told once"


@pytest.mark.parametrize("late", [False, True])
def test_story_of_a_token_that_raises_in_the_step_that_takes_it(late: bool) -> None:
    """The host sees it only when it tries the rows alone."""
    device = Device(late)
    said = in_turns(
        device, batch_of(10, POISON - 1, 30), batch_of(-1, -2, -3), batch_of(-1, -3), batch_of(-2)
    )
    assert [ids_of(one) for one in said] == [
        [(11,), (POISON,), (31,)],
        [(12,), (), (32,)],
        [(13,), (33,)],
        [(34,)],
    ]
    assert [sorted(failed) for _, failed in said] == [[], [1], [], []]
    assert "RuntimeError" in said[1][1][1]


def test_a_step_that_followed_nothing_stands_and_the_next_is_told_its_tokens() -> None:
    device = Device(late=True)
    said = in_turns(device, batch_of(POISON, 20), batch_of(40, 50), batch_of(-2, -1))
    assert [ids_of(one) for one in said] == [[(), (21,)], [(41,), (51,)], [(52,), (42,)]]
    assert device.launched.count([1, 2, 40, 50]) == 1, "not run again"
    assert device.launched[-1] == [51, 41], "the device has those of the rows that were tried alone"


def test_all_rows_of_a_step_may_be_lost_but_what_it_says_of_slots_is_not() -> None:
    device = Device(late=False)
    said = in_turns(device, batch_of(POISON), batch_of(-1, left=[9]), batch_of(60))
    assert [ids_of(one) for one in said] == [[()], [()], [(61,)]]
    assert device.changes == [9]


def test_rows_are_named_as_their_batch_has_them_though_fewer_were_run() -> None:
    said = in_turns(Device(), batch_of(POISON, 20, 30), batch_of(-1, -2, -3), batch_of(-2))
    assert [ids_of(one) for one in said] == [[(), (21,), (31,)], [(), (22,), (32,)], [(23,)]]
