"""ModelRunner: holds slots, runs one batch at a time through the model, samples. Control flow of a step.

A slot is a running sequence's place on this worker: its block table, its sampling settings and, where penalties
need them, its token counts. A batch brings changes only, so the cost of a step follows change, not context length.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.backend import BackendName, choose_backend
from kernels.cache import AskedTooMuch, CacheLayout, PagedCache, PoolMemory, dtype_name
from kernels.device import OnGpu, gib, resolve_device
from kernels.grammar import LIBRARY, BadGrammar, GrammarCompiler, GrammarFault, Matcher
from kernels.model import CausalModel, load_model
from kernels.model_config import ModelConfig, UnsupportedModel
from kernels.pool_size import asked_blocks
from kernels.prompt_scores import PromptToScore, ScoringRow, score
from kernels.sampler import choose_sampler, sample_there
from kernels.sampling import Draw, TokenCounts, needs_counts
from kernels.step import BatchLike, JoinedLike, SamplingLike, StepLayout, StepResult, TokenLogprob
from kernels.weights import Checkpoint, Progress, find_model, resolve_dtype

if TYPE_CHECKING:
    from kernels.gpu.steps import DeviceSteps

NO_GRAMMARS = "cannot be held to: this worker was made without grammars"


@dataclass(slots=True)
class _Slot:
    prompt_len: int
    num_blocks: int
    sampling: SamplingLike
    counts: TokenCounts | None = None
    matcher: Matcher | None = None
    fault: str | None = None  # why it cannot have one of these, though its request asks for it


class ModelRunner:
    """Model, cache and slots of one worker. `run` belongs to one thread at a time; blocks are the caller's to give."""

    def __init__(
        self,
        model: CausalModel,
        cache: PagedCache,
        max_num_seqs: int,
        max_model_len: int,
        threads: int,
        revision: str,
        grammars: GrammarCompiler | None = None,
        gpu: OnGpu | None = None,
    ) -> None:
        """`grammars` are compiled for the model's tokenizer; without them every request with a grammar fails. `gpu`:
        the model's kernels read a step's arrays on the device."""
        self.model = model
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self._threads = threads
        self._revision = revision
        self.grammars = grammars
        self._sampler = choose_sampler(None if gpu is None else model.device)
        self._slots: list[_Slot | None] = [None] * max_num_seqs
        table_width = -(-max_model_len // cache.layout.block_size)
        self._tables = np.zeros((max_num_seqs, table_width), dtype=np.int32)
        # In the blocks of each slot; 0: it is empty.
        self._room_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        # The few slots for which a step has more to do than arithmetic, so that it need not look at all.
        self._counting: dict[int, TokenCounts] = {}
        self._scoring: dict[int, PromptToScore] = {}
        self._prepared_thread = -1
        self._device_steps: DeviceSteps | None = None
        if gpu is not None:
            # Nothing of a GPU is imported where there is none.
            from kernels.gpu.steps import make_device_steps

            self._device_steps = make_device_steps(model, cache, self._tables, max_model_len, gpu)

    @property
    def layout(self) -> CacheLayout:
        return self.cache.layout

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def attention_backend(self) -> str:
        return self.model.backend.name

    def describe(self) -> dict[str, str | int | float]:
        """The model's part of the fingerprint: two workers may exchange blocks when all of it is equal."""
        config = self.model.config
        return {
            "architecture": config.architecture,
            "weights_revision": self._revision,
            "dtype": dtype_name(self.model.dtype),
            "device_kind": self.model.device.type,
            "num_heads": config.num_heads,
            "rope": ",".join(f"{name}={value}" for name, value in config.rope),
            "rms_norm_eps": config.rms_norm_eps,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
            "attention_backend": self.attention_backend,
            "grammar_library": LIBRARY,
            "linear_policy": ";".join(f"{k}={v}" for k, v in self.model.products.describe().items()),
            **self.layout.describe(),
        }

    @property
    def why_no_graphs(self) -> str | None:
        """None where decode steps run as graphs, else why they do not."""
        graphs = None if self._device_steps is None else self._device_steps.graphs
        return "they were not asked for" if graphs is None else graphs.broken

    def prepare_grammars(self) -> None:
        """Reads the tokenizer for them, which holds the interpreter a while: to be called before serving. A model
        whose tokenizer is not of the kind that grammars need refuses each of them when it comes."""
        with contextlib.suppress(BadGrammar):
            if self.grammars is not None:
                self.grammars.prepare()

    def has_grammar(self, kind: str, text: str) -> bool:
        """Whether a request can have it without a compile."""
        return self.grammars is not None and (kind, text) in self.grammars

    def compile_grammar(self, kind: str, text: str) -> str | None:
        """None when it is ready for a request; else why it cannot be. For any thread, beside a step."""
        if self.grammars is None:
            return NO_GRAMMARS
        try:
            self.grammars.compile(kind, text)
        except BadGrammar as error:
            return str(error)
        return None

    def hold_grammar(self, kind: str, text: str) -> None:
        """It stays compiled until it is let go as often: a step never waits for a compile."""
        if self.grammars is not None:
            self.grammars.hold(kind, text)

    def let_grammar_go(self, kind: str, text: str) -> None:
        if self.grammars is not None:
            self.grammars.let_go(kind, text)

    def run(self, batch: BatchLike) -> StepResult:
        """One step: slots leave, join and grow; all rows are computed; rows that sample give one token each, rows of
        prompts to be scored the log-probabilities of the prompt tokens that follow theirs."""
        self._prepare_thread()
        with torch.inference_mode():
            for slot in batch.left:
                self._leave(slot)
            for joined in batch.joined:
                self._join(joined)
            for slot, blocks in batch.grown:
                self._grow(slot, blocks)
            if not batch.slots:
                return StepResult((), ())
            return self._compute(batch)

    def _prepare_thread(self) -> None:
        """Thread counts belong to the calling thread in OpenMP, so they are set in the thread that runs."""
        thread = threading.get_ident()
        if thread != self._prepared_thread:
            torch.set_num_threads(self._threads)
            self._prepared_thread = thread

    def _leave(self, slot: int) -> None:
        self._slots[slot] = None
        self._room_tokens[slot] = 0
        self._counting.pop(slot, None)
        self._scoring.pop(slot, None)

    def _join(self, joined: JoinedLike) -> None:
        """Does not raise over what a request asks for: what else changes with its batch would be lost."""
        self._leave(joined.slot)
        sampling, tokens = joined.sampling, joined.tokens
        prompt, outputs = tokens[: joined.prompt_len], tokens[joined.prompt_len :]
        slot = _Slot(joined.prompt_len, len(joined.blocks), sampling)
        slot.matcher, slot.fault = self._match(sampling, outputs)
        if needs_counts(sampling):
            try:
                slot.counts = TokenCounts(self.vocab_size, prompt, outputs)
                self._counting[joined.slot] = slot.counts
            except IndexError as error:
                slot.fault = str(error)
        if sampling.prompt_logprobs is not None and joined.scored < joined.prompt_len:
            self._scoring[joined.slot] = PromptToScore(prompt, joined.scored, sampling.prompt_logprobs)
        self._slots[joined.slot] = slot
        self._write_table(joined.slot, 0, joined.blocks)

    def _match(self, sampling: SamplingLike, outputs: Sequence[int]) -> tuple[Matcher | None, str | None]:
        """Its grammar with the outputs so far replayed, or why there is none."""
        grammar = sampling.grammar
        if grammar is None:
            return None, None
        if self.grammars is None:
            return None, f"its grammar {NO_GRAMMARS}"
        try:
            return self.grammars.matcher(grammar.kind, grammar.text, outputs), None
        except BadGrammar as error:
            return None, f"its grammar {error}"
        except GrammarFault as error:
            return None, str(error)

    def _grow(self, slot: int, blocks: Sequence[int]) -> None:
        held = self._slots[slot]
        assert held is not None, f"slot {slot} is empty"
        self._write_table(slot, held.num_blocks, blocks)
        held.num_blocks += len(blocks)

    def _write_table(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        self._tables[slot, first : first + len(blocks)] = blocks
        self._room_tokens[slot] = (first + len(blocks)) * self.layout.block_size
        if self._device_steps is not None:
            self._device_steps.blocks_changed(slot, first, len(blocks))

    def _compute(self, batch: BatchLike) -> StepResult:
        starts = np.asarray(batch.starts, dtype=np.int32)
        counts = np.asarray(batch.counts, dtype=np.int32)
        slots = np.asarray(batch.slots, dtype=np.int64)
        ends = starts + counts
        assert counts.min() >= 1 and ends.max() <= self.max_model_len
        lacking = slots[self._room_tokens[slots] < ends]
        assert not len(lacking), f"slot {lacking[0]} has no block for its last position, or is empty"
        step = StepLayout(starts, counts, slots, self._tables, self.layout.block_size, self.model.device)
        token_ids = np.asarray(batch.token_ids, dtype=np.int64)
        rows = np.flatnonzero(np.asarray(batch.samples, dtype=bool))
        lasts = (step.firsts + counts - 1)[rows]
        hidden, of_rows = self._forward(token_ids, step, lasts)
        ids: list[tuple[int, ...]] = [()] * len(slots)
        logprobs: list[tuple[TokenLogprob, ...] | None] = [None] * len(slots)
        faults: dict[int, str] = {}
        if len(rows):
            logits_there = self.model.logits(of_rows)
            newest = token_ids[lasts]
            # A GPU still computes while the grammars say what they allow.
            draws, faults = self._draws(
                rows.tolist(), slots[rows].tolist(), ends[rows].tolist(), newest.tolist()
            )
            if faults:
                whole = [place for place, row in enumerate(rows.tolist()) if row not in faults]
                rows, logits_there = rows[whole], logits_there[whole]
            outputs = sample_there(self._sampler, logits_there, list(draws.values()))
            for row, sampled in zip(rows.tolist(), outputs, strict=True):
                if sampled is None:
                    faults[row] = "its logits are not finite"
                else:
                    ids[row] = (sampled[0],)
                    logprobs[row] = None if sampled[1] is None else (sampled[1],)
        prompts = self._score(slots, step, hidden, faults)
        if (
            self.model.device.type == "cuda"
        ):  # its blocks may be copied by another stream as soon as it is over
            torch.cuda.current_stream(self.model.device).synchronize()
        self._count(slots.tolist(), ids)
        return StepResult(tuple(ids), tuple(logprobs), prompts, faults)

    def _forward(
        self, token_ids: np.ndarray, step: StepLayout, lasts: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of the step's tokens, and those of tokens `lasts`."""
        if self._device_steps is not None:
            return self._device_steps.run(token_ids, step, lasts)
        device = self.model.device
        hidden = self.model.forward(torch.from_numpy(token_ids).to(device), step, self.cache)
        return hidden, hidden[torch.from_numpy(lasts).to(device)]

    def _count(self, slots: list[int], ids: list[tuple[int, ...]]) -> None:
        """The last thing that a step does, and nothing in it raises: one that does is run again, row by row."""
        if not self._counting:
            return
        for slot, row in zip(slots, ids, strict=True):
            if slot in self._counting:
                for token_id in row:
                    self._counting[slot].append(token_id)

    def _score(
        self, slots: np.ndarray, step: StepLayout, hidden: torch.Tensor, faults: dict[int, str]
    ) -> dict[int, tuple[TokenLogprob, ...]]:
        """Log-probabilities of prompt tokens, by row; rows that cannot be scored are added to `faults`."""
        if not self._scoring:
            return {}
        rows = {}
        for row, slot in enumerate(slots.tolist()):
            prompt = self._scoring.get(slot)
            if prompt is not None:
                start, count = int(step.starts[row]), int(step.counts[row])
                rows[row] = ScoringRow(prompt, int(step.firsts[row]), start, start + count)
        prompts = {}
        for row, said in zip(
            rows, score(self.model, self._sampler, hidden, list(rows.values())), strict=True
        ):
            if said is None:
                faults[row] = "its logits are not finite"
            elif said:
                prompts[row] = said
        return prompts

    def _draws(
        self, rows: list[int], slots: list[int], ends: list[int], newest: list[int]
    ) -> tuple[dict[int, Draw], dict[int, str]]:
        """By row: how it is drawn, or why it cannot be. `newest` are the rows' last tokens, `ends` their lengths."""
        draws: dict[int, Draw] = {}
        faults: dict[int, str] = {}
        for row, slot, end, token_id in zip(rows, slots, ends, newest, strict=True):
            held = self._slots[slot]
            assert held is not None  # it has blocks
            index = end - held.prompt_len
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


def _allowed(matcher: Matcher, index: int, newest: int, end_token_ids: Sequence[int]) -> np.ndarray:
    """The mask of output `index`. The matcher takes a token in when the next one is asked for: so a step that is
    run again, because another row of it raised, finds it as it was. Raises GrammarFault."""
    if matcher.num_consumed == index - 1:
        matcher.consume([newest])
    assert matcher.num_consumed == index, f"{matcher.num_consumed} outputs replayed, {index} are there"
    return matcher.allowed(end_token_ids)


def load_runner(
    model_path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    block_size: int = 16,
    num_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    max_num_seqs: int = 64,
    max_model_len: int | None = None,
    threads: int = 1,
    progress: Progress | None = None,
    pool_memory: PoolMemory | None = None,
    gpu: OnGpu | None = None,
    backend: BackendName = "auto",
) -> ModelRunner:
    """Loads a model and makes its cache. Give `num_blocks` or `kv_cache_bytes`; a GPU is profiled without.

    Raises `ModelNotFound` (no such model), `UnsupportedModel` (a field or tensor it does not honour) and
    `AskedTooMuch` (a length or a cache that cannot be had).
    """
    torch.set_num_threads(threads)
    place = resolve_device(device)
    folder = find_model(model_path)
    config = ModelConfig.from_folder(folder)
    length = _served_length(config, max_model_len)
    weight_dtype = resolve_dtype(dtype, config)
    choice = choose_backend(place, config.head_dim, block_size, threads, weight_dtype, length, backend)
    heads = (config.num_layers, config.num_kv_heads, config.head_dim)
    layout = CacheLayout(*heads, block_size, weight_dtype, token_major=choice.on_device)
    num_blocks = asked_blocks(layout, place, num_blocks, kv_cache_bytes)
    with torch.inference_mode(), Checkpoint(folder, config) as checkpoint:
        revision = checkpoint.revision()
        model = load_model(checkpoint, weight_dtype, place, choice, length, threads, progress)
    gpu = gpu or OnGpu()
    if num_blocks is None:
        from kernels.gpu.memory import profiled_blocks

        num_blocks = profiled_blocks(model, layout, gpu, max_num_seqs, length)
    # Outside inference mode: blocks that arrive are written from other threads, which are not in it.
    try:
        cache = PagedCache(layout, num_blocks, place, pool_memory)
    except (OSError, torch.OutOfMemoryError) as error:
        size = gib(num_blocks * layout.block_bytes)
        raise AskedTooMuch(
            f"no room for {num_blocks} KV blocks ({size}) on {place}: lower --kv-cache-memory or --num-kv-blocks"
        ) from error
    grammars = GrammarCompiler(folder, config.vocab_size)
    on_device = gpu if choice.on_device else None
    return ModelRunner(model, cache, max_num_seqs, length, threads, revision, grammars, on_device)


def _served_length(config: ModelConfig, asked: int | None) -> int:
    try:
        return config.served_length(asked)
    except UnsupportedModel as error:
        if asked is None:
            raise
        raise AskedTooMuch(
            f"--max-model-len {asked}: this model allows {error.value} at most ({error.field})"
        ) from error
