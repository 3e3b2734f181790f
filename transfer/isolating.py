"""Runs batches on a runner so that a row which raises costs its own request alone, with two batches out too.

When a step raises, at its launch or when it is waited for, each of its rows is run alone: those that raise again are
named, the others go on. Rows may be computed again without harm: the same tokens give the same KV in the same places.

A batch that was launched behind such a step took what that one's rows had drawn on the device, which is worth nothing
now: what it came to is thrown away, and it is run again with the tokens that are known meanwhile. One that is launched
later is told the tokens too, since the device has others by then. Rows whose row before failed are not run at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Protocol

from common.batching import Batch, RowResult
from common.request import TokenLogprobs
from transfer.pure_worker import Results

log = logging.getLogger(__name__)


class LogprobLike(Protocol):
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...


class StepResult(Protocol):
    """Per row: ids (none where it does not sample) and log-probabilities (None where not asked). `prompts`: what
    rows tell of their prompts. `faults`: rows that should have sampled or scored and could not."""

    @property
    def ids(self) -> Seq[tuple[int, ...]]: ...
    @property
    def logprobs(self) -> Seq[Seq[LogprobLike] | None]: ...
    @property
    def prompts(self) -> Mapping[int, Seq[LogprobLike]]: ...
    @property
    def faults(self) -> Mapping[int, str]: ...


class ComingStep(Protocol):
    """A step that was put on a device."""

    def result(self) -> StepResult:
        """Waits for it. In the order of launches."""
        ...

    def discard(self) -> None:
        """Waits until the device is through with it; what it came to is nobody's."""
        ...


class Launches(Protocol):
    """What this file needs of `kernels.runner.ModelRunner`."""

    def launch(self, batch: Batch) -> ComingStep:
        """A token id below 0, -1 - r, is what row r of the batch launched before draws."""
        ...


@dataclass(slots=True)
class Row:
    """One row's result in the terms of `common`. Not frozen: one for every token."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


NOTHING = Row((), None)
NO_TOKEN = "the step before it came to no token"


@dataclass(slots=True, eq=False)
class _Step:
    batch: Batch
    before: _Step | None
    """Whose tokens it names, while it has no results."""
    kept: Seq[int]
    """The rows that are run."""
    coming: ComingStep | None = None
    results: Results | None = None
    all_known: bool = False
    """It was launched with the tokens that it names."""
    retried: bool = False


class IsolatingSteps:
    """Belongs to the thread that runs steps. What `launch` gives back is to be called in the order of launches."""

    def __init__(self, runner: Launches) -> None:
        self._runner = runner
        self._newest: _Step | None = None
        self._there: _Step | None = None
        """The step whose tokens the device has by its rows: the last one launched, if that went well."""

    def run(self, batch: Batch) -> Results:
        """One step, waited for: a result per row, and for rows that could not be computed, why."""
        return self.launch(batch)()

    def launch(self, batch: Batch) -> Callable[[], Results]:
        """The next step. Raises nothing over its rows; what it gives back waits for the results."""
        step = _Step(batch, self._newest if batch.ahead else None, range(len(batch.rows)))
        self._newest = step
        if step.before is None or step.before is self._there:
            self._launch(step, batch)
        else:
            self._launch_known(step, with_changes=True)
        return partial(self._results, step)

    def _launch(self, step: _Step, batch: Batch) -> None:
        """`batch` has the kept rows of the step's."""
        self._there = None
        try:
            step.coming = self._runner.launch(batch)
        except Exception:
            self._run_one_by_one(step)
        else:
            self._there = step if len(step.kept) == len(step.batch.rows) else None

    def _launch_known(self, step: _Step, *, with_changes: bool) -> None:
        """With tokens that the step before turned out to have drawn, for those rows that got one."""
        ids = self._named(step)
        step.all_known = True
        step.kept = [row for row, place in enumerate(_places(step.batch)) if place is None or row in ids]
        part = _part(step.batch, step.kept, ids)
        if with_changes:
            batch = step.batch
            part = replace(part, left=batch.left, joined=batch.joined, grown=batch.grown)
        self._launch(step, part)

    def _named(self, step: _Step) -> dict[int, int]:
        """By row: the token that it names, where there is one."""
        if step.before is None:
            return {}
        results, _ = self._results(step.before)
        named = {
            row: results[place].ids for row, place in enumerate(_places(step.batch)) if place is not None
        }
        return {row: ids[0] for row, ids in named.items() if ids}

    def _results(self, step: _Step) -> Results:
        if step.results is None and step.before is not None and step.before.retried and not step.all_known:
            assert step.coming is not None
            step.coming.discard()
            self._launch_known(step, with_changes=False)
        if step.results is None:
            assert step.coming is not None
            try:
                result = step.coming.result()
                step.results = _whole(step, _rows(result), dict(result.faults))
            except Exception:
                self._run_one_by_one(step)
        assert step.results is not None
        step.before = step.coming = None
        return step.results

    def _run_one_by_one(self, step: _Step) -> None:
        """The slots' changes stand in the batch that raised: the runner applies those first."""
        log.exception("a step of %d rows raised; trying its rows one by one", len(step.kept))
        ids = self._named(step)
        self._there, step.retried = None, True
        results: list[RowResult] = []
        failed: dict[int, str] = {}
        for place, row in enumerate(step.kept):
            try:
                result = self._runner.launch(_part(step.batch, [row], ids)).result()
                results += _rows(result)
                if result.faults:
                    failed[place] = result.faults[0]
            except Exception as error:
                log.exception("request %s raised alone", step.batch.rows[row].key[0])
                failed[place] = f"{type(error).__name__} in its step"
                results.append(NOTHING)
        step.results = _whole(step, results, failed)


def _places(batch: Batch) -> list[int | None]:
    """By row: the row of the batch before whose token it names."""
    if not batch.ahead:
        return [None] * len(batch.rows)
    firsts = accumulate(batch.counts[:-1], initial=0)
    return [-1 - batch.token_ids[first] if batch.token_ids[first] < 0 else None for first in firsts]


def _part(batch: Batch, rows: Seq[int], ids: Mapping[int, int]) -> Batch:
    """Some rows, without the changes of slots. `ids`: by row, the token that it names."""
    firsts = list(accumulate(batch.counts, initial=0))
    tokens: list[int] = []
    for row in rows:
        tokens += [ids[row]] if row in ids else batch.token_ids[firsts[row] : firsts[row + 1]]
    return Batch(
        slots=[batch.slots[row] for row in rows],
        starts=[batch.starts[row] for row in rows],
        counts=[batch.counts[row] for row in rows],
        samples=[batch.samples[row] for row in rows],
        token_ids=tokens,
        rows=[batch.rows[row] for row in rows],
        scores=batch.scores,
    )


def _whole(step: _Step, results: Seq[RowResult], failed: Mapping[int, str]) -> Results:
    """Results of the kept rows as those of all."""
    if len(step.kept) == len(step.batch.rows):
        return results, dict(failed)
    whole: list[RowResult] = [NOTHING] * len(step.batch.rows)
    reasons = dict.fromkeys(range(len(whole)), NO_TOKEN)
    for place, row in enumerate(step.kept):
        whole[row] = results[place]
        del reasons[row]
        if place in failed:
            reasons[row] = failed[place]
    return whole, reasons


def _rows(result: StepResult) -> list[RowResult]:
    each = zip(result.ids, result.logprobs, strict=True)
    rows: list[RowResult] = [
        Row(ids, None if logprobs is None else _said(logprobs)) if ids else NOTHING for ids, logprobs in each
    ]
    for index, said in result.prompts.items():
        rows[index] = Row(rows[index].ids, rows[index].logprobs, _said(said))
    return rows


def _said(logprobs: Seq[LogprobLike]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(one.logprob, one.top) for one in logprobs)
