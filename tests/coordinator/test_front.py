"""The front's ear: each output index once, in order, whoever says it, however late."""

from __future__ import annotations

from random import Random

import pytest

from common.front_messages import Progress, RequestFinished
from common.messages import FinishReason, Message, PromptRow, TokenRow, Tokens
from common.request import Attempt, RequestId, TokenLogprobs
from coordinator.front import Front

A = RequestId("a")


class Bench:
    def __init__(self) -> None:
        self.front = Front(gap_after_s=0.5)
        self.front.open(A)
        self.seq = 0
        self.ids: list[int] = []
        self.finish: str | None = None
        self.heard: list[Message] = []

    def say(
        self,
        first: int,
        *ids: int,
        now: float = 0.0,
        attempt: int = 1,
        finish: FinishReason | None = None,
    ) -> None:
        self.seq += 1
        self.take(Tokens(self.seq, (TokenRow(A, Attempt(attempt), first, ids, None, finish),)), now)

    def take(self, tokens: Tokens, now: float = 0.0) -> None:
        deltas, heard = self.front.accept(tokens, "w", 1, now)
        for delta in deltas:
            assert self.finish is None, "a token after the end"
            self.ids += delta.ids
            self.finish = delta.finish
        self.heard += heard

    @property
    def progress(self) -> list[int]:
        """What the coordinator has heard, which must be what the client got."""
        got: list[int] = []
        for message in self.heard:
            for _, first, ids in message.rows if isinstance(message, Progress) else ():
                assert first == len(got)
                got += ids
        return got


def test_tokens_in_order() -> None:
    bench = Bench()
    bench.say(0, 5)
    bench.say(1, 6)
    bench.say(2, 7, 8, finish="length")
    assert (bench.ids, bench.finish) == ([5, 6, 7, 8], "length")
    assert bench.progress == bench.ids and bench.heard[-1] == RequestFinished(A, "length")
    assert len(bench.front) == 0


def test_said_twice_is_heard_once() -> None:
    """The prefill worker's first token, and the decode worker's repetition of it."""
    bench = Bench()
    bench.say(0, 5)
    bench.say(0, 5)
    bench.say(0, 5, 6)
    bench.say(1, 6)
    assert bench.ids == [5, 6] == bench.progress


def test_log_probabilities_are_cut_like_their_tokens() -> None:
    front = Front()
    front.open(A)
    logprobs = tuple(TokenLogprobs(-float(n)) for n in range(3))
    front.accept(Tokens(1, (TokenRow(A, Attempt(1), 0, (5,), logprobs[:1]),)), "w", 1, 0.0)
    ((delta,), _) = front.accept(Tokens(2, (TokenRow(A, Attempt(1), 0, (5, 6, 7), logprobs),)), "w", 1, 0.0)
    assert (delta.ids, delta.logprobs) == ((6, 7), logprobs[1:])


def test_a_row_that_comes_early_waits_for_the_ones_before() -> None:
    bench = Bench()
    bench.say(2, 7, finish="stop")
    bench.say(1, 6)
    assert bench.ids == [] and bench.front.gaps(0.4) == []
    bench.say(0, 5, now=0.45)
    assert (bench.ids, bench.finish) == ([5, 6, 7], "stop")
    assert bench.front.gaps(9.0) == []


def test_a_gap_is_told_once_with_the_latest_attempt() -> None:
    bench = Bench()
    bench.say(0, 5)
    bench.say(2, 7, now=1.0, attempt=2)
    bench.say(3, 8, now=1.1, attempt=1)
    assert bench.front.gaps(1.4) == []
    assert bench.front.gaps(1.5) == [Progress((), ((A, Attempt(2)),))]
    assert bench.front.gaps(9.0) == []
    bench.say(1, 6, 7, now=9.0, attempt=3)
    assert bench.ids == [5, 6, 7]


def test_a_second_gap_gets_its_own_time() -> None:
    bench = Bench()
    bench.say(1, 6, now=0.0)
    bench.say(3, 8, now=0.0)
    bench.say(0, 5, now=0.4)
    assert bench.ids == [5, 6] and bench.front.gaps(0.6) == []
    assert bench.front.gaps(0.9) != []


def test_a_finish_that_comes_without_a_new_token() -> None:
    bench = Bench()
    bench.say(0, 5, 6)
    bench.say(1, 6, finish="stop")
    assert (bench.ids, bench.finish) == ([5, 6], "stop")


def test_closed_means_deaf_and_closing_again_is_nothing() -> None:
    bench = Bench()
    bench.say(1, 6)
    assert bench.front.close(A) and not bench.front.close(A)
    bench.say(0, 5)
    assert bench.ids == [] and bench.front.late_rows == 1 and bench.front.gaps(9.0) == []


def test_lost_messages_show_by_their_numbers() -> None:
    front = Front()
    for seq in (1, 2, 5, 6):
        front.accept(Tokens(seq, ()), "w", 1, 0.0)
    front.accept(Tokens(1, ()), "w", 2, 0.0)  # a new incarnation counts from the start
    assert front.lost_messages == 2


def test_rows_kept_for_one_stream_are_bounded() -> None:
    bench = Bench()
    for index in range(2, 2000):
        bench.say(index, index)
    assert len(bench.front._streams[A].early) <= 256
    assert len(bench.front.gaps(9.0)) == 1


@pytest.mark.parametrize("seed", range(30))
def test_any_order_any_doubling_any_cut(seed: int) -> None:
    random = Random(seed)
    answer = list(range(100, 140))
    rows = []
    for attempt in (1, 2):
        at = 0 if attempt == 1 else random.randrange(20)
        while at < len(answer):
            count = random.randint(1, 4)
            end = min(len(answer), at + count)
            finish: FinishReason | None = "length" if end == len(answer) else None
            rows.append(TokenRow(A, Attempt(attempt), at, tuple(answer[at:end]), None, finish))
            at = end
    rows += random.sample(rows, 8)
    random.shuffle(rows)
    bench = Bench()
    for number, row in enumerate(rows):
        bench.take(Tokens(number + 1, (row,)))
    assert (bench.ids, bench.finish) == (answer, "length")
    assert bench.progress == answer
    assert sum(isinstance(message, RequestFinished) for message in bench.heard) == 1


def test_what_the_decode_worker_had_cached_is_said_though_its_token_is_known() -> None:
    bench = Bench()
    rows = [TokenRow(A, Attempt(1), 0, (5,), None, None, cached) for cached in (48, 64)]
    heard = [bench.front.accept(Tokens(seq, (row,)), "w", 1, 0.0) for seq, row in enumerate(rows, 1)]
    assert [[(d.ids, d.cached_tokens) for d in deltas] for deltas, _ in heard] == [[((5,), 48)], [((), 64)]]
    assert heard[1][1] == [], "the coordinator hears of tokens only"


SCORES = tuple(TokenLogprobs(-float(index)) for index in range(1, 12))  # of a prompt of twelve tokens


class PromptBench(Bench):
    """A stream that owes log-probabilities of its prompt before any token."""

    def __init__(self) -> None:
        super().__init__()
        self.front.close(A)
        self.front.open(A, 12)
        self.scores: list[TokenLogprobs] = []

    def prompt(self, first: int, end: int, now: float = 0.0, attempt: int = 1) -> None:
        self.seq += 1
        row = PromptRow(A, Attempt(attempt), first, SCORES[first - 1 : end - 1])
        self.take(Tokens(self.seq, (), (row,)), now)

    def take(self, tokens: Tokens, now: float = 0.0) -> None:
        deltas, heard = self.front.accept(tokens, "w", 1, now)
        for delta in deltas:
            assert not (delta.ids and len(self.scores) < 11), "a token before its prompt is complete"
            self.scores += delta.prompt_logprobs
            self.ids += delta.ids
            self.finish = delta.finish
        self.heard += heard


def test_a_prompt_in_order_then_its_tokens() -> None:
    bench = PromptBench()
    bench.prompt(1, 6)
    bench.prompt(6, 12)
    bench.say(0, 5)
    assert bench.scores == list(SCORES) and bench.ids == [5] and bench.front.gaps(9.0) == []


def test_tokens_wait_for_the_prompt() -> None:
    bench = PromptBench()
    bench.say(0, 5)
    bench.say(1, 6, finish="stop")
    bench.prompt(6, 12)
    assert bench.ids == [] and bench.scores == [] and bench.heard == []
    bench.prompt(1, 7, now=0.3)
    assert bench.scores == list(SCORES) and (bench.ids, bench.finish) == ([5, 6], "stop")
    assert bench.progress == [5, 6] and bench.heard[-1] == RequestFinished(A, "stop")
    assert bench.front.gaps(9.0) == []


def test_a_lost_piece_of_a_prompt_is_a_gap_and_the_next_attempt_fills_it() -> None:
    bench = PromptBench()
    bench.prompt(1, 4)
    bench.prompt(8, 12, now=1.0)
    bench.say(0, 5, now=1.1)
    assert bench.front.gaps(1.4) == []
    assert bench.front.gaps(1.5) == [Progress((), ((A, Attempt(1)),))]
    assert bench.front.gaps(9.0) == []
    bench.prompt(1, 8, now=9.0, attempt=2)
    bench.prompt(8, 12, now=9.0, attempt=2)
    bench.say(0, 5, now=9.0, attempt=2)
    assert bench.scores == list(SCORES) and bench.ids == [5]


def test_a_gap_stays_one_when_what_comes_does_not_close_it() -> None:
    bench = PromptBench()
    bench.prompt(8, 12)
    bench.prompt(1, 5, now=0.2)
    assert bench.front.gaps(0.6) == []
    assert bench.front.gaps(0.8) == [Progress((), ((A, Attempt(1)),))]


def test_a_lost_end_of_a_prompt_shows_by_the_token_after_it() -> None:
    bench = PromptBench()
    bench.prompt(1, 11)
    assert bench.front.gaps(9.0) == []
    bench.say(0, 5, now=9.0)
    assert bench.front.gaps(9.5) == [Progress((), ((A, Attempt(1)),))]


def test_rows_of_a_prompt_nobody_asked_for_are_dropped() -> None:
    bench = Bench()
    rows = (PromptRow(A, Attempt(1), 1, SCORES), PromptRow(RequestId("b"), Attempt(1), 1, SCORES))
    assert bench.front.accept(Tokens(1, (), rows), "w", 1, 0.0) == ([], [])
    assert bench.front.late_rows == 2 and bench.front.gaps(9.0) == []
    beyond = PromptBench()
    beyond.take(Tokens(1, (), (PromptRow(A, Attempt(1), 12, SCORES),)))
    beyond.prompt(1, 12)
    beyond.take(Tokens(3, (), (PromptRow(A, Attempt(1), 5, (*SCORES, *SCORES)),)))
    assert beyond.scores == list(SCORES) and beyond.front.gaps(9.0) == []


@pytest.mark.parametrize("seed", range(20))
def test_prompts_in_any_order_any_doubling_any_cut(seed: int) -> None:
    random = Random(seed)
    messages = [
        Tokens(0, (TokenRow(A, Attempt(1), index, (index,), None, "length" if index == 4 else None),))
        for index in range(5)
    ]
    for attempt in (1, 2):
        at = 1
        while at < 12:
            end = min(12, at + random.randint(1, 4))
            messages.append(Tokens(0, (), (PromptRow(A, Attempt(attempt), at, SCORES[at - 1 : end - 1]),)))
            at = end
    messages += random.sample(messages, 5)
    random.shuffle(messages)
    bench = PromptBench()
    for message in messages:
        bench.take(message)
    assert bench.scores == list(SCORES) and (bench.ids, bench.finish) == ([0, 1, 2, 3, 4], "length")
