"""Whether those who run can go on to their ends beside one more: the watermark of the KV pool. Pure.

What a sequence will still take is predicted: its answer ends where answers of at least its present length ended lately,
but not past its `max_tokens`. Everybody grows by a token a step, so of those who run the ones with less left end first
and give their blocks back to the others. The most that they hold together is reached just before one of them ends:

    most = max over i of  blocks(tokens of all that have at least as much left as i, each grown by what i has left)

One more is let in if, with it, that is no more than there are. (Gong et al., "Past-Future Scheduler for LLM Serving
under SLA Guarantees", ASPLOS 2025; they draw lengths from the recent ones where we take a mean.) Predictions err, so
one block for each that runs stays free besides when it comes in; where that was too little, somebody is put out.

With nobody to learn from, an answer is taken to become as long again as it is: then much is let in at first, and what
turns out to be too much is put out. The first of its kind would wait for the whole of `max_tokens` otherwise, which for
a chat is all of the context.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq

from common.sequence import Sequence

MEMORY = 256  # answers
BINS = 32
LOOK_AGAIN = 8
"""Steps for which a refusal stands where nobody has left: what runs does not shrink, but what is said of it changes."""


class AnswerLengths:
    """Of answers that came to their end, by powers of two of their tokens; older ones count less."""

    def __init__(self) -> None:
        self._counts = [0.0] * BINS
        self._sums = [0.0] * BINS
        self._means = [0.0] * (BINS + 1)  # of those in this bin or a later one; 0: of none

    def ended(self, tokens: int) -> None:
        keep = 1.0 - 1.0 / MEMORY
        self._counts = [keep * count for count in self._counts]
        self._sums = [keep * total for total in self._sums]
        bin_ = min(tokens.bit_length(), BINS - 1)
        self._counts[bin_] += 1
        self._sums[bin_] += tokens
        count = total = 0.0
        for bin_ in range(BINS - 1, -1, -1):
            count, total = count + self._counts[bin_], total + self._sums[bin_]
            self._means[bin_] = total / count if count > 0.5 else 0.0  # one of long ago says nothing any more

    def expected(self, so_far: int) -> float:
        """Tokens in all of an answer that has so many and goes on: always more."""
        bin_ = so_far.bit_length()
        for mean in self._means[bin_ : bin_ + 2]:
            if mean > so_far:
                return mean
        return 2.0 * so_far + 1


class Forecast:
    """`stay_within` is asked about each that would come in; `ended` and `changed` say what makes it answer anew."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._lengths = AnswerLengths()
        self._too_long = 1 << 62  # tokens of the least one refused since somebody left
        self._refused_for = 0

    def ended(self, answer_tokens: int) -> None:
        self._lengths.ended(answer_tokens)

    def changed(self) -> None:
        """Blocks came back."""
        self._too_long = 1 << 62

    def step(self) -> None:
        self._refused_for += 1
        if self._refused_for >= LOOK_AGAIN:
            self.changed()

    def refused(self, seq: Sequence) -> bool:
        """Whether one no longer than it was told no lately: it need not be asked about again."""
        return len(seq.tokens) >= self._too_long

    def stay_within(self, seq: Sequence, others: Seq[Sequence], available: int) -> bool:
        """Whether `others` and `seq`, whose blocks are taken, can go on to their ends with so many blocks more."""
        if not others:
            return True
        seqs = (seq, *others)
        in_reach = available + sum([len(one.blocks) for one in seqs])
        if self._at_their_longest(seqs) < in_reach or self._most_blocks(seqs) <= in_reach:
            return True
        self._too_long, self._refused_for = min(self._too_long, len(seq.tokens)), 0
        return False

    def _at_their_longest(self, seqs: Seq[Sequence]) -> float:
        """Blocks that all would have together if each came to its `max_tokens` and stayed: no less than
        `_most_blocks`, and asked first because it is told in a tenth of the time. (The one is for rounding.)"""
        return sum([seq.max_len for seq in seqs]) / self._block_size + len(seqs) / 2 + 1

    def _most_blocks(self, seqs: Iterable[Sequence]) -> float:
        expected = self._lengths.expected
        left_and_length = []
        for seq in seqs:
            length = len(seq.tokens)
            end = min(seq.max_len, seq.prompt_len + expected(length - seq.prompt_len))
            left_and_length.append((max(1.0, end - length), length))
        left_and_length.sort(reverse=True)
        most = tokens = 0.0
        for number, (left, length) in enumerate(left_and_length, 1):
            tokens += length
            most = max(
                most, (tokens + number * left) / self._block_size + number / 2
            )  # half a block each is empty
        return most
