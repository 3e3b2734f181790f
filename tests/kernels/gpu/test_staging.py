"""A step's arrays on their way to the device: what lies where, however steps follow."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import kernels.gpu.staging
from kernels.gpu.device_step import DeviceStep
from kernels.gpu.staging import CHANGES, StepArrays, StepStaging, _Pinned
from tests.kernels.gpu.grid import device_step

CPU = torch.device("cpu")


def arrays(
    starts: list[int], counts: list[int], slots: list[int], ids: list[int], lasts: list[int]
) -> StepArrays:
    return StepArrays(*(np.array(column, dtype=np.int32) for column in (starts, counts, slots, lasts, ids)))


def same(left: DeviceStep, right: DeviceStep) -> None:
    for name in ("tables", "starts", "counts", "firsts", "token_rows", "positions"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
        assert getattr(left, name).dtype == torch.int32 and getattr(left, name).is_contiguous()
    assert (left.max_count, left.max_end) == (right.max_count, right.max_end)


def test_steps_go_up_as_they_are_through_any_history_of_tables() -> None:
    chance = random.Random(5)
    tables = np.zeros((6, 10), dtype=np.int32)
    staging = StepStaging(tables, 40, CPU)
    for _ in range(200):
        for _ in range(chance.randrange(4)):  # joins and growth, the same place more than once
            slot, first = chance.randrange(6), chance.randrange(10)
            count = chance.randrange(1, 11 - first)
            tables[slot, first : first + count] = [chance.randrange(2**31) for _ in range(count)]
            staging.changed(slot, first, count)
        rows = chance.randrange(1, 7)
        slots = chance.sample(range(6), rows)
        starts = [chance.randrange(100) for _ in slots]
        counts = [chance.randrange(1, 9) for _ in slots]  # now and then more than was reckoned with
        ids = [chance.randrange(1000) for _ in range(sum(counts))]
        lasts = sorted(chance.sample(range(sum(counts)), chance.randrange(rows + 1)))
        staging.upload(arrays(starts, counts, slots, ids, lasts), rows)
        wanted = device_step(starts, counts, tables[slots])
        step, token_ids = staging.on_device(rows, sum(counts), max_count=max(counts), max_end=wanted.max_end)
        same(step, wanted)
        assert token_ids.tolist() == ids
        assert staging.lasts(rows, sum(counts), len(lasts)).tolist() == lasts


def test_more_changes_than_one_copy_takes_arrive_whole() -> None:
    tables = np.zeros((3, 3000), dtype=np.int32)
    staging = StepStaging(tables, 3, CPU)
    staging.upload(arrays([0], [1], [0], [0], []), 3)
    before, _ = staging.on_device(3, 3, max_count=1, max_end=3)
    tables[:] = np.random.default_rng(0).integers(0, 2**31, tables.shape, dtype=np.int32)
    for slot in range(3):
        staging.changed(slot, 0, 3000)
    assert tables.size > 2 * CHANGES
    staging.upload(arrays([0, 1, 2], [1, 1, 1], [2, 0, 1], [7, 8, 9], []), 3)
    step, ids = staging.on_device(3, 3, max_count=1, max_end=3)
    assert torch.equal(step.tables, torch.from_numpy(tables[[2, 0, 1]])) and ids.tolist() == [7, 8, 9]
    assert step.starts.data_ptr() == before.starts.data_ptr(), "a graph reads nothing else"


def test_rows_that_pad_have_no_tokens_and_theirs_no_position() -> None:
    tables = np.arange(40, dtype=np.int32).reshape(4, 10)
    staging = StepStaging(tables, 16, CPU)
    for slot in range(4):
        staging.changed(slot, 0, 10)
    staging.upload(arrays([5, 9], [1, 1], [3, 1], [11, 12], [0, 1]), 4)
    step, ids = staging.on_device(4, 4, max_count=1, max_end=100)
    assert step.counts.tolist() == [1, 1, 0, 0] and step.positions.tolist() == [5, 9, -1, -1]
    assert step.firsts.tolist() == [0, 1, 2, 3] and step.token_rows.tolist() == [0, 1, 2, 3]
    assert ids.tolist() == [11, 12, 0, 0]
    assert torch.equal(step.tables[:2], torch.from_numpy(tables[[3, 1]]))
    assert staging.lasts(4, 4, 2).tolist() == [0, 1]


def test_buffers_stay_where_they_are() -> None:
    staging = StepStaging(np.zeros((4, 10), dtype=np.int32), 16, CPU)
    staging.upload(arrays([0], [1], [0], [3], []), 2)
    before, _ = staging.on_device(2, 2, max_count=1, max_end=100)
    pointers = [getattr(before, name).data_ptr() for name in ("tables", "starts", "positions", "token_rows")]
    staging.changed(1, 0, 10)
    staging.upload(arrays([8, 9], [1, 1], [0, 1], [3, 4], [1]), 2)
    after, _ = staging.on_device(2, 2, max_count=1, max_end=100)
    assert pointers == [
        getattr(after, name).data_ptr() for name in ("tables", "starts", "positions", "token_rows")
    ]


def test_a_token_that_the_host_does_not_know_is_the_one_sampled_before() -> None:
    staging = StepStaging(np.zeros((5, 2), dtype=np.int32), 16, CPU)
    staging.newest_ids.copy_(torch.tensor([100, 101, 102, 103, 104], dtype=torch.int32))
    staging.upload(arrays([4, 5, 6, 0], [1, 1, 1, 2], [0, 1, 2, 3], [-3, 9, -1, 0, -5], []), 4)
    _, ids = staging.on_device(4, 5, max_count=2, max_end=8)
    assert ids.tolist() == [102, 9, 100, 0, 104]


class Busy(_Pinned):
    """Memory that the device still copies from: whoever writes there without waiting is stopped."""

    def __init__(self, num_ints: int, device: torch.device) -> None:
        super().__init__(num_ints, device)
        self._own = self.array

    def wait(self) -> None:
        self.array = self._own

    def copying(self) -> None:
        self.array = self._own.view()
        self.array.flags.writeable = False


def test_no_pinned_memory_is_written_while_the_device_copies_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.gpu.staging, "_Pinned", Busy)
    staging = StepStaging(np.zeros((4, 10), dtype=np.int32), 16, CPU)
    for number in range(5):
        staging.changed(number % 4, 0, 10)
        staging.upload(arrays([number], [1], [0], [3], [0]), 1)
        assert sum(not pinned.array.flags.writeable for pinned in staging._pinned) == min(number + 1, 2)


def test_a_token_that_was_none_is_one_of_the_vocabulary() -> None:
    staging = StepStaging(np.zeros((2, 2), dtype=np.int32), 16, CPU)
    staging.newest_ids.copy_(torch.tensor([-1, 7], dtype=torch.int32))
    staging.upload(arrays([4, 5], [1, 1], [0, 1], [-1, -2], []), 2)
    _, ids = staging.on_device(2, 2, max_count=1, max_end=8)
    assert ids.tolist() == [0, 7], "-1 would point outside the embedding, and end a GPU's context"
