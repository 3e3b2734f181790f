"""What a runner keeps of each running sequence: its block table, its sampling settings, and what its draws need of the
tokens before (their counts for penalties, its place in its grammar, the prompt tokens that are to be scored).

A slot is a running sequence's place on this worker. A batch brings changes only, so the cost of a step follows change,
not context length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kernels.grammar import BadGrammar, GrammarCompiler, GrammarFault, Matcher
from kernels.prompt_scores import PromptToScore
from kernels.sampling import Draw, TokenCounts, needs_counts
from kernels.step import BatchLike, JoinedLike, SamplingLike

NO_GRAMMARS = "cannot be held to: this worker was made without grammars"

TableChanged = Callable[[int, int, int], None]
"""Entries of a slot's table are others now: slot, first, count."""


@dataclass(slots=True)
class _Slot:
    prompt_len: int
    num_blocks: int
    sampling: SamplingLike
    counts: TokenCounts | None = None
    matcher: Matcher | None = None
    fault: str | None = None  # why it cannot have one of these, though its request asks for it


class Slots:
    """Belongs to the thread that runs steps. `tables` `[max_num_seqs, width]` int32: pool blocks by slot."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._slots: list[_Slot | None] = [None] * max_num_seqs
        self.tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self.table_changed: TableChanged | None = None
        """Hears of each change: for copies of the tables elsewhere."""
        # In the blocks of each slot; 0: it is empty.
        self._room_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        # The few slots for which a step has more to do than arithmetic, so that it need not look at all.
        self._counting: dict[int, TokenCounts] = {}
        self._scoring: dict[int, PromptToScore] = {}

    def apply(self, batch: BatchLike, grammars: GrammarCompiler | None) -> None:
        """Slots leave, join and grow."""
        for slot in batch.left:
            self._leave(slot)
        for joined in batch.joined:
            self._join(joined, grammars)
        for slot, blocks in batch.grown:
            self._grow(slot, blocks)

    def _leave(self, slot: int) -> None:
        self._slots[slot] = None
        self._room_tokens[slot] = 0
        self._counting.pop(slot, None)
        self._scoring.pop(slot, None)

    def _join(self, joined: JoinedLike, grammars: GrammarCompiler | None) -> None:
        """Does not raise over what a request asks for: what else changes with its batch would be lost."""
        self._leave(joined.slot)
        sampling, tokens = joined.sampling, joined.tokens
        prompt, outputs = tokens[: joined.prompt_len], tokens[joined.prompt_len :]
        slot = _Slot(joined.prompt_len, len(joined.blocks), sampling)
        slot.matcher, slot.fault = _match(sampling, outputs, grammars)
        if needs_counts(sampling):
            try:
                slot.counts = TokenCounts(self._vocab_size, prompt, outputs)
                self._counting[joined.slot] = slot.counts
            except IndexError as error:
                slot.fault = str(error)
        if sampling.prompt_logprobs is not None and joined.scored < joined.prompt_len:
            self._scoring[joined.slot] = PromptToScore(prompt, joined.scored, sampling.prompt_logprobs)
        self._slots[joined.slot] = slot
        self._write_table(joined.slot, 0, joined.blocks)

    def _grow(self, slot: int, blocks: Sequence[int]) -> None:
        held = self._slots[slot]
        assert held is not None, f"slot {slot} is empty"
        self._write_table(slot, held.num_blocks, blocks)
        held.num_blocks += len(blocks)

    def _write_table(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        self.tables[slot, first : first + len(blocks)] = blocks
        self._room_tokens[slot] = (first + len(blocks)) * self._block_size
        if self.table_changed is not None:
            self.table_changed(slot, first, len(blocks))

    # ------------------------------------------------------------ one step

    def check_room(self, slots: np.ndarray, ends: np.ndarray) -> None:
        """That each slot has blocks for positions below its end; both `[rows]`."""
        lacking = slots[self._room_tokens[slots] < ends]
        assert not len(lacking), f"slot {lacking[0]} has no block for its last position, or is empty"

    def draws(
        self, rows: list[int], slots: list[int], ends: list[int], newest: list[int]
    ) -> tuple[dict[int, Draw], dict[int, str]]:
        """By row: how it is drawn, or why it cannot be. `newest` are the rows' last tokens, below 0 where the host has
        not seen them, `ends` their lengths."""
        draws: dict[int, Draw] = {}
        faults: dict[int, str] = {}
        for row, slot, end, token_id in zip(rows, slots, ends, newest, strict=True):
            held = self._slots[slot]
            assert held is not None  # it has blocks
            index = end - held.prompt_len
            assert token_id >= 0 or not _is_drawn_on_host(held.sampling), (
                f"slot {slot} cannot be drawn before the host sees its newest token"
            )
            if held.fault is not None:
                faults[row] = held.fault
            elif held.matcher is None:
                draws[row] = Draw(held.sampling, index, held.counts)
            else:
                try:
                    allowed = _allowed(held.matcher, index, token_id, held.sampling.end_token_ids)
                except GrammarFault as fault:
                    faults[row] = str(fault)
                else:
                    draws[row] = Draw(held.sampling, index, held.counts, allowed)
        return draws, faults

    def prompts_to_score(self, slots: list[int]) -> dict[int, PromptToScore]:
        """By row, of those rows whose slots have some."""
        if not self._scoring:
            return {}
        return {row: self._scoring[slot] for row, slot in enumerate(slots) if slot in self._scoring}

    def counting(self, slots: list[int]) -> dict[int, TokenCounts]:
        """By row, of those rows whose slots count: to be told of what they sample."""
        if not self._counting:
            return {}
        return {row: self._counting[slot] for row, slot in enumerate(slots) if slot in self._counting}


def _is_drawn_on_host(sampling: SamplingLike) -> bool:
    """In part: what its draw needs of the tokens before is kept here."""
    return sampling.grammar is not None or needs_counts(sampling)


def _match(
    sampling: SamplingLike, outputs: Sequence[int], grammars: GrammarCompiler | None
) -> tuple[Matcher | None, str | None]:
    """Its grammar with the outputs so far replayed, or why there is none."""
    grammar = sampling.grammar
    if grammar is None:
        return None, None
    if grammars is None:
        return None, f"its grammar {NO_GRAMMARS}"
    try:
        return grammars.matcher(grammar.kind, grammar.text, outputs), None
    except BadGrammar as error:
        return None, f"its grammar {error}"
    except GrammarFault as error:
        return None, str(error)


def _allowed(matcher: Matcher, index: int, newest: int, end_token_ids: Sequence[int]) -> np.ndarray:
    """The mask of output `index`. The matcher takes a token in when the next one is asked for: so a step that is
    run again, because another row of it raised, finds it as it was. Raises GrammarFault."""
    if matcher.num_consumed == index - 1:
        matcher.consume([newest])
    assert matcher.num_consumed == index, f"{matcher.num_consumed} outputs replayed, {index} are there"
    return matcher.allowed(end_token_ids)
