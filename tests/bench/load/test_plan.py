"""Arrivals have the rate and the burstiness that was asked for; lengths, prompts and who leaves come from the seed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from bench.load.arrivals import arrival_times_s
from bench.load.bodies import BodyShape
from bench.load.lengths import Span, parse_span
from bench.load.plan import Load, plan, warmups
from bench.load.prompts import WORDS, PromptMaker, Words, measured_words, words_maker
from bench.load.records import Planned
from bench.load.traces import Row, Trace

LOAD = Load(2.0, 1.0, Span(100, 300), Span(5, 9), num_requests=50)


def gaps(rate: float, burstiness: float, count: int = 20_000) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    times = np.fromiter(itertools.islice(arrival_times_s(rate, burstiness, 5), count), np.float64)
    return np.diff(times, prepend=0.0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_variation_of_their_gamma(burstiness: float) -> None:
    found = gaps(8.0, burstiness)
    assert found.mean() == pytest.approx(1 / 8, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    fit = stats.kstest(found, stats.gamma(burstiness, scale=1 / (8.0 * burstiness)).cdf)
    assert fit.pvalue > 1e-3


def test_a_poisson_process_has_poisson_counts() -> None:
    times = np.fromiter(itertools.islice(arrival_times_s(5.0, 1.0, 9), 20_000), np.float64)
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.1)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert list(itertools.islice(arrival_times_s(float("inf"), 1.0, 1), 3)) == [0, 0, 0]


def test_a_plan_is_a_function_of_its_seed_and_each_part_of_its_own() -> None:
    one = list(plan(LOAD, 7))
    assert one == list(plan(LOAD, 7))
    assert one != list(plan(LOAD, 8))
    burstier = list(plan(replace(LOAD, burstiness=0.1), 7))
    assert [of.prompt_tokens for of in burstier] == [of.prompt_tokens for of in one]
    assert [of.due_s for of in burstier] != [of.due_s for of in one]


def test_lengths_are_uniform_with_both_bounds() -> None:
    found = list(plan(replace(LOAD, num_requests=2000), 3))
    assert {of.output_tokens for of in found} == {5, 6, 7, 8, 9}
    assert min(of.prompt_tokens for of in found) >= 100
    assert max(of.prompt_tokens for of in found) <= 300
    assert np.mean([of.prompt_tokens for of in found]) == pytest.approx(200, rel=0.03)


def test_time_or_number_ends_a_plan_whichever_is_first() -> None:
    assert len(list(plan(LOAD, 1))) == 50
    short = list(plan(replace(LOAD, duration_s=5.0), 1))
    assert 0 < len(short) < 50 and max(of.due_s for of in short) < 5.0


def test_a_share_leaves_within_its_answer() -> None:
    found = list(plan(replace(LOAD, abort_fraction=0.3, num_requests=2000), 3))
    leaving = [of for of in found if of.leave_after is not None]
    assert len(leaving) / 2000 == pytest.approx(0.3, abs=0.04)
    assert all(1 <= (of.leave_after or 0) < of.output_tokens for of in leaving)


@pytest.mark.parametrize(("text", "span"), [("256", Span(256, 256)), ("8:16", Span(8, 16))])
def test_spans_are_read(text: str, span: Span) -> None:
    assert parse_span(text) == span and str(span) == text


@pytest.mark.parametrize("text", ["", "0", "9:8", "a", "1:2:3", "-4"])
def test_bad_spans_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_span(text)


# ------------------------------------------------------------ prompts


def test_prompts_have_the_wanted_length_and_are_new_for_another_request_or_seed() -> None:
    maker = PromptMaker(1, 1000, 2000)
    first, second = (maker.ids(Planned(index, 0.0, 256, 1)) for index in (0, 1))
    assert len(first) == len(second) == 256
    assert first != second and first != PromptMaker(2, 1000, 2000).ids(Planned(0, 0.0, 256, 1))
    assert min(first) >= 1000 and max(first) < 2000
    assert first == PromptMaker(1, 1000, 2000).ids(Planned(0, 0.0, 256, 1))


def test_shared_blocks_are_the_same_tokens_and_the_rest_is_not() -> None:
    maker = PromptMaker(1, 1000, 2000, block_tokens=16)
    one = maker.ids(Planned(0, 0.0, 40, 1, shared=(5, 6, 7)))
    other = maker.ids(Planned(1, 0.0, 40, 1, shared=(5, 6, 9)))
    assert len(one) == len(other) == 40
    assert one[:32] == other[:32] and one[32:] != other[32:]
    assert one[:16] != one[16:32]


def test_a_prefix_stands_before_every_prompt_but_those_that_warm_up() -> None:
    load = replace(LOAD, prefix_len=12)
    maker = PromptMaker(3, 1000, 2000, load.block_tokens)
    prompts = [maker.ids(planned) for planned in plan(load, 3)]
    assert len({tuple(ids[:12]) for ids in prompts}) == 1
    assert len({tuple(ids[12:20]) for ids in prompts}) == 50
    assert tuple(maker.ids(warmups(load, 1, 3)[0])[:12]) != tuple(prompts[0][:12])


def test_traces_keep_their_times_lengths_and_blocks() -> None:
    rows = (Row(0.0, 10, 2, (1,)), Row(1.5, 20, 3, (1, 2)))
    found = list(plan(replace(LOAD, trace=Trace("t", rows, 8)), 1))
    assert [(of.due_s, of.prompt_tokens, of.output_tokens, of.shared) for of in found] == [
        (0.0, 10, 2, (1,)),
        (1.5, 20, 3, (1, 2)),
    ]


def test_words_stand_for_tokens_as_the_server_counts_them() -> None:
    words = measured_words((16, 47), (80, 111))
    assert words == Words(31, 1.0) and words.exact
    assert len(words_maker(1, words, 0).ids(Planned(0, 0.0, 256, 1))) == 256 - 31
    assert measured_words((16, 20), (80, 148)) == Words(-12, 2.0)
    assert len(set(WORDS)) == len(WORDS) > 100


def test_bodies_are_what_a_server_reads() -> None:
    shape = BodyShape("m", True, 0.0, True, {"top_p": 0.5})
    body = shape.body(Planned(0, 0.0, 3, 7), words_maker(1, Words(), 0)).decode()
    assert body.startswith('{"model": "m", "max_tokens": 7')
    assert '"top_p": 0.5' in body and '"ignore_eos": true' in body
    assert body.endswith('"}]}') and '"messages":[{"role":"user","content":"' in body
