"""The forecast of the pool: what is let in beside those who run, and what is learnt of answers."""

from __future__ import annotations

import random

import pytest

from common.lifecycle import Phase
from common.sequence import Sequence
from decode_node.forecast import LOOK_AGAIN, AnswerLengths, Forecast
from tests.common.stepping import BLOCK, attempt, prompt, request


def running(prompt_tokens: int, said: int, max_tokens: int, arrival: int = 0) -> Sequence:
    """Holds the blocks of the tokens it has."""
    seq = Sequence(
        request(f"r{arrival}", prompt(prompt_tokens), max_tokens), attempt(), b"", arrival, Phase.QUEUED, 0.0
    )
    seq.tokens += [1] * said
    seq.blocks = list(range(-(-len(seq.tokens) // BLOCK)))
    return seq


def learnt(*answers: int) -> AnswerLengths:
    lengths = AnswerLengths()
    for tokens in answers:
        lengths.ended(tokens)
    return lengths


# ---------------------------------------------------------------- lengths


def test_answers_are_expected_to_end_where_those_ended_that_came_so_far() -> None:
    lengths = learnt(*([10] * 30), *([100] * 10))
    assert lengths.expected(1) == pytest.approx(32.5, rel=0.1), "of all"
    assert lengths.expected(20) == pytest.approx(100, rel=0.01), "of those that came so far"
    assert lengths.expected(100) == 201, "none came so far: as long again"
    assert AnswerLengths().expected(0) == 1 and AnswerLengths().expected(50) == 101


def test_an_answer_is_always_expected_to_go_on() -> None:
    chance = random.Random(1)
    lengths = learnt(*(chance.randrange(1, 2000) for _ in range(300)))
    assert all(lengths.expected(so_far) > so_far for so_far in range(3000))


def test_what_answers_were_like_long_ago_is_forgotten() -> None:
    lengths = learnt(*([1000] * 200), *([20] * 1500))
    assert lengths.expected(1) < 40
    assert lengths.expected(100) < 1000


# ---------------------------------------------------------------- room


def fits(seqs: list[Sequence], free: int, *answers: int) -> bool:
    forecast = Forecast(BLOCK)
    for tokens in answers:
        forecast.ended(tokens)
    return forecast.stay_within(seqs[0], seqs[1:], free)


def test_those_that_end_first_give_their_blocks_to_the_others() -> None:
    """Two of 40 tokens that are about to end, and one that will take 40 more: it takes what they leave."""
    ending = [running(36, 4, 5, arrival) for arrival in range(2)]
    grows = running(4, 0, 40)
    assert fits([grows, *ending], 4, *([40] * 20))
    together = [running(36, 4, 44, arrival) for arrival in range(2)]
    assert not fits([grows, *together], 4, *([44] * 20)), "all three grow until the end"
    assert fits([grows, *together], 32, *([44] * 20))


def test_one_that_is_alone_always_fits() -> None:
    assert fits([running(10, 0, 1000)], 0, *([1000] * 20))


def test_max_tokens_bounds_what_is_expected() -> None:
    seqs = [running(8, 2, 4, arrival) for arrival in range(4)]
    assert fits(seqs, 4, *([1000] * 20))


def test_a_simulated_batch_holds_what_was_said_and_hardly_less() -> None:
    """Against the plain thing: everybody grows by a token a step and leaves at its end."""
    chance = random.Random(5)
    for _ in range(50):
        seqs = [
            running(chance.randrange(1, 60), chance.randrange(0, 20), 20 + chance.randrange(40), arrival)
            for arrival in range(12)
        ]
        most = 0
        lengths, ends = [len(seq.tokens) for seq in seqs], [seq.max_len for seq in seqs]
        for step in range(80):
            there = [length + step for length, end in zip(lengths, ends, strict=True) if length + step <= end]
            most = max(most, sum(-(-length // BLOCK) for length in there))
        said = Forecast(BLOCK)
        said._lengths = learnt(*([1 << 20] * 20))
        assert most - 4 <= said._most_blocks(seqs) <= most + 6


def test_a_refusal_stands_until_somebody_leaves_or_for_a_few_steps() -> None:
    forecast = Forecast(BLOCK)
    for _ in range(20):
        forecast.ended(44)
    seqs = [running(36, 4, 44, arrival) for arrival in range(3)]
    assert not forecast.stay_within(seqs[0], seqs[1:], 3)
    longer, shorter = running(50, 0, 5), running(20, 0, 5)
    assert forecast.refused(longer) and not forecast.refused(shorter)
    forecast.changed()
    assert not forecast.refused(longer)
    assert not forecast.stay_within(seqs[0], seqs[1:], 3)
    for _ in range(LOOK_AGAIN):
        assert forecast.refused(longer)
        forecast.step()
    assert not forecast.refused(longer)
