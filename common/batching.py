"""The batching core: what both nodes share in forming a step's ragged batch out of sequences and blocks. Pure.

A sequence is its token ids (prompt, then output) of which the first `num_computed` have KV. Whatever is left is
what a step may compute, a chunk at a time; the row whose chunk reaches the last token samples the next one. So
prefill, decode (one token left) and recompute after preemption are the same thing, and the nodes only differ in
which sequences they let in and in what order.

    tokens   p p p p p p p p p p o o o        prompt_len = 10, three tokens out
    KV       ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ·        num_computed = 12: this is a decode row, one query token
    blocks   [   7   ][   2   ][   9   ][ 4    taken whole for the prompt, then one by one

Who frees what: `free` is the only place that gives a sequence's blocks back, and it does nothing while the
sequence stands in a batch that is out; `finish` calls it again when the batch is back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from common.blocks import BlockPool
from common.prefix import extend_chain, seed_hash
from common.request import Request, SamplingParams, TokenLogprobs
from common.sequence import NO_SLOT, Sequence
from common.step_times import StepShape

SCORED_COST = 3
"""What a prompt token takes of a step's budget whose log-probability is to be said, in tokens that are computed only:
the output head and the search for the best took twice as long as the layers of the default model."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A slot of the runner that stands for another sequence from this batch on."""

    slot: int
    tokens: Seq[int]
    prompt_len: int
    blocks: Seq[int]
    sampling: SamplingParams
    scored: int


@dataclass(slots=True)
class Batch:
    """One step: a delta of the runner's slots, then one row per sequence that computes.

    The runner applies `left`, then `joined`, then `grown`: a slot may leave and be joined by another sequence.
    `token_ids` is flat: row i has `counts[i]` of them, starting at absolute position `starts[i]`.
    """

    joined: list[Joined] = field(default_factory=list)
    grown: list[tuple[int, list[int]]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    rows: list[Sequence] = field(default_factory=list)
    scores: bool = False  # a row owes log-probabilities of its prompt
    # Token ids below 0 are there: -1 - r is what row r of the batch before this one samples.
    ahead: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def shape(self) -> StepShape:
        """A row of one token counts as no chunk, whatever that token is."""
        rows = len(self.starts)
        return StepShape(rows, sum(self.starts), len(self.token_ids) - self.counts.count(1))


class RowResult(Protocol):
    """What the runner says of one row: no ids where the row does not sample. `prompt_logprobs` are those of the
    sequence's next prompt tokens, where it owes them."""

    @property
    def ids(self) -> tuple[int, ...]: ...
    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None: ...
    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]: ...


class BatchingCore:
    """Blocks, slots and rows. Holds no policy: callers decide who is placed, chunked, grown or freed."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool,
        fingerprint: str,
        tenant_scope: bool = False,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefix_caching = prefix_caching
        self._fingerprint = fingerprint
        self._tenant_scope = tenant_scope
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._joining: dict[int, Sequence] = {}
        self._growing: dict[int, list[int]] = {}
        self._leaving: list[int] = []
        self._arrivals = 0
        self._batch = Batch()
        self._taken: Batch | None = None  # handed out last and not back
        self._taken_joining: dict[int, Sequence] = {}
        self._out: list[Batch] = []  # handed out and not back, oldest first

    @property
    def num_out(self) -> int:
        """Batches that were handed out and are not back."""
        return len(self._out)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------ blocks

    def hash_prompt(self, seq: Sequence) -> list[bytes]:
        """Prefix hashes of the complete blocks of everything the sequence holds."""
        if self._shares(seq):
            self._extend_chain(seq)
        return seq.chain

    def _extend_chain(self, seq: Sequence) -> None:
        seq.seed = seq.seed or self._seed(seq.request)
        extend_chain(seq.chain, seq.seed, seq.tokens, self.block_size)

    def _shares(self, seq: Sequence) -> bool:
        """Choices of one prompt share it also where prefix caching is off: they are one request to the user."""
        return self.prefix_caching or seq.request.leader != ""

    def _seed(self, request: Request) -> bytes:
        """Who shares: everybody, or with `tenant_scope` each tenant; `cache_salt` narrows it further. Without prefix
        caching, each family for itself."""
        whose = request.tenant if self._tenant_scope else ""
        family = "" if self.prefix_caching else request.leader
        return seed_hash(self._fingerprint, request.cache_salt, whose, family=family)

    def reserve(self, seq: Sequence, *, num_tokens: int, usable_hits: int) -> bool:
        """Takes blocks for `num_tokens` tokens, whole or not at all. False is "later".

        Blocks of a cached prefix count, but not past `usable_hits` tokens, nor past the last token before one whose
        log-probability is owed: only computing a token tells how likely the next one is.
        """
        assert not seq.blocks
        if seq.owes_scores:
            usable_hits = min(usable_hits, seq.scored - 1)
        hits = self.pool.match(self.hash_prompt(seq)[: usable_hits // self.block_size])
        self.pool.acquire(hits)
        fresh = self.pool.allocate(self.blocks_for(num_tokens) - len(hits))
        if fresh is None:
            self.pool.release(hits)
            return False
        seq.blocks = hits + fresh
        seq.num_computed = seq.found_tokens = len(hits) * self.block_size
        if seq.preemptions == 0:  # what a recompute finds again was saved to nobody
            seq.cached_tokens = seq.num_computed
        seq.published = len(hits)
        return True

    def lacks_block(self, seq: Sequence, ahead: int = 0) -> bool:
        """Whether its tokens, and so many more that are on their way, do not all have room for their KV."""
        return len(seq.tokens) + ahead > len(seq.blocks) * self.block_size

    def grow(self, seq: Sequence, ahead: int = 0) -> bool:
        """Makes room for the KV of every token the sequence holds, and of so many more that are on their way. False is
        "no block left"."""
        missing = self.blocks_for(len(seq.tokens) + ahead) - len(seq.blocks)
        if missing <= 0:
            return True
        fresh = self.pool.allocate(missing)
        if fresh is None:
            return False
        seq.blocks += fresh
        if seq.slot != NO_SLOT and seq.slot not in self._joining:
            self._growing.setdefault(seq.slot, []).extend(fresh)
        return True

    def grow_by_one(self, seqs: Seq[Sequence]) -> bool:
        """The same for sequences that lack one block each and have a slot, in one go: for all of them or for none."""
        fresh = self.pool.allocate(len(seqs))
        if fresh is None:
            return False
        joining, growing = self._joining, self._growing
        for seq, block in zip(seqs, fresh, strict=True):
            seq.blocks.append(block)
            if seq.slot not in joining:
                growing.setdefault(seq.slot, []).append(block)
        return True

    def publish(self, seq: Sequence) -> None:
        """Offers the sequence's complete, computed blocks to the prefix cache."""
        complete = seq.num_computed // self.block_size
        if complete <= seq.published or not self._shares(seq):
            return
        self._extend_chain(seq)
        publish, blocks, chain = self.pool.publish, seq.blocks, seq.chain
        for index in range(seq.published, complete):
            publish(blocks[index], chain[index])
        seq.published = complete

    def free(self, seq: Sequence) -> None:
        """Gives back slot and blocks, unless the sequence stands in a batch that is out (then `finish` does)."""
        if seq.in_batch:
            return
        self.leave_slot(seq)
        blocks, seq.blocks = seq.blocks, []
        self.pool.release(blocks)
        seq.num_computed = seq.found_tokens = seq.published = 0

    # ------------------------------------------------------------ slots

    def place(self, seq: Sequence) -> None:
        """Gives the sequence a slot of the runner; the next batch tells the runner so."""
        seq.slot = self._free_slots.pop()
        self._joining[seq.slot] = seq

    def leave_slot(self, seq: Sequence) -> None:
        """Nothing of the sequence is left to run here, though its blocks may still be wanted. Idempotent."""
        if seq.slot == NO_SLOT:
            return
        if self._joining.pop(seq.slot, None) is None:
            self._leaving.append(seq.slot)
        self._growing.pop(seq.slot, None)
        self._free_slots.append(seq.slot)
        seq.slot = NO_SLOT

    # ------------------------------------------------------------ one step

    def add_row(self, seq: Sequence, count: int) -> None:
        """The next `count` tokens of `seq` stand in the batch being built."""
        batch = self._batch
        start = seq.num_computed
        batch.rows.append(seq)
        batch.slots.append(seq.slot)
        batch.starts.append(start)
        batch.counts.append(count)
        batch.samples.append(start + count == len(seq.tokens))
        batch.token_ids += seq.tokens[start : start + count]
        batch.scores |= seq.owes_scores
        seq.in_batch += 1

    def add_decode_rows(self, seqs: Seq[Sequence]) -> None:
        """The same for sequences with one token left each, in one go."""
        batch = self._batch
        batch.slots += [seq.slot for seq in seqs]
        batch.starts += [seq.num_computed for seq in seqs]
        batch.token_ids += [seq.tokens[-1] for seq in seqs]
        for seq in seqs:
            seq.in_batch += 1
        batch.rows += seqs
        batch.counts += [1] * len(seqs)
        batch.samples += [True] * len(seqs)

    def add_rows_ahead(self, seqs: Seq[Sequence]) -> None:
        """The same for sequences whose last token the batch that is out has yet to sample: where it stands in that
        batch is said instead."""
        if not seqs:
            return
        batch, before = self._batch, self._out[-1]
        places = {id(seq): place for place, seq in enumerate(before.rows)}
        for seq in seqs:
            place = places[id(seq)]
            assert before.samples[place] and seq.in_batch == 1
            batch.rows.append(seq)
            batch.slots.append(seq.slot)
            batch.starts.append(before.starts[place] + before.counts[place])
            batch.counts.append(1)
            batch.samples.append(True)
            batch.token_ids.append(-1 - place)
            seq.in_batch += 1
        batch.ahead = True

    def take_batch(self) -> Batch | None:
        """The batch built since the last call, with what changed in the slots; None when no row computes."""
        if not self._batch.rows:
            return None
        batch, self._batch = self._batch, Batch()
        batch.left, self._leaving = self._leaving, []
        batch.grown = list(self._growing.items())
        batch.joined = [
            Joined(
                slot, tuple(seq.tokens), seq.prompt_len, tuple(seq.blocks), seq.request.sampling, seq.scored
            )
            for slot, seq in self._joining.items()
        ]
        self._growing = {}
        self._taken, self._taken_joining, self._joining = batch, self._joining, {}
        self._out.append(batch)
        return batch

    def is_running(self) -> None:
        """What was handed out runs: `unmake` undoes only what is built from here on."""
        self._taken, self._taken_joining = None, {}

    def _is_back(self, batch: Batch) -> bool:
        """Whether it was out until now."""
        left = [one for one in self._out if one is not batch]
        was_out, self._out = len(left) < len(self._out), left
        if self._taken is batch:
            self._taken, self._taken_joining = None, {}
        return was_out

    def take_back(self, batch: Batch, results: Seq[RowResult]) -> list[int]:
        """A batch is computed. What ended meanwhile gives its blocks back; the others have more tokens with KV, and who
        sampled has one token more. Returns the rows that want a look: not those of a sequence that goes on with one
        more token, like nearly all (`Sequence.plain_until`), for which nothing more than that is done here."""
        if len(results) != len(batch.rows):
            raise ValueError(f"{len(results)} results of {len(batch.rows)} rows")
        self._is_back(batch)
        notable: list[int] = []
        rows = zip(range(len(results)), batch.rows, results, strict=True)
        try:
            for row, seq, result in rows:
                seq.in_batch -= 1
                ids, tokens = result.ids, seq.tokens
                if ids and len(tokens) < seq.plain_until:
                    (token,) = ids
                    tokens.append(token)
                    seq.num_computed += 1
                    if token in seq.end_token_ids:
                        notable.append(row)
                else:
                    notable.append(row)
                    self._take_back_row(seq, batch.counts[row], ids)
        finally:
            self._out_of(seq for _, seq, _ in rows)  # nobody is left, unless we erred over one of them
        return notable

    def _take_back_row(self, seq: Sequence, count: int, ids: tuple[int, ...]) -> None:
        if seq.over:
            self.free(seq)
            return
        seq.num_computed = computed = seq.num_computed + count
        # One token at a time completes a block only at its end.
        if count > 1 or computed % self.block_size == 0:
            self.publish(seq)
        if ids:
            (token,) = ids
            seq.tokens.append(token)

    def abandon(self, batch: Batch) -> None:
        """A batch ran and came to nothing, because taking it in raised: whoever of it ended gives its blocks back."""
        if self._is_back(batch):  # else it was taken back, and what came after raised
            self._out_of(batch.rows)

    def unmake(self) -> None:
        """The batch being built, or just taken, is not run after all: nobody stands in it, and the next one tells the
        runner what this one would have."""
        building, self._batch = self._batch, Batch()
        taken, self._taken = self._taken, None
        if taken is not None:
            self._out.pop()
            self._leaving = taken.left + self._leaving
            self._joining = self._taken_joining | self._joining
            for slot, blocks in taken.grown:
                self._growing[slot] = blocks + self._growing.get(slot, [])
            self._taken_joining = {}
            self._out_of(taken.rows)
        self._out_of(building.rows)

    def _out_of(self, rows: Iterable[Sequence]) -> None:
        for seq in rows:
            seq.in_batch -= 1
            if seq.over:
                self.free(seq)
