"""ModelRunner: launches steps, one after the other: changes of slots, forward pass, draws. Control flow of a step.

A step is put on the device and not waited for. So the host can decide and launch the next one while it runs; where a
row of that one takes the token which this one draws, the token stays on the device, and the batch says -1 - r for what
row r of the batch before it draws. Whether it may is the scheduler's to know (`may_go_ahead`); what a draw needs of its
newest token on the host is refused here. On a CPU a step is computed when it is launched.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.backend import BackendName, choose_backend
from kernels.cache import AskedTooMuch, CacheLayout, PagedCache, PoolMemory, dtype_name
from kernels.device import OnGpu, gib, resolve_device
from kernels.grammar import LIBRARY, BadGrammar, GrammarCompiler
from kernels.launched import LaunchedStep
from kernels.model import CausalModel, load_model
from kernels.model_config import ModelConfig, UnsupportedModel
from kernels.pool_size import asked_blocks
from kernels.prompt_scores import PromptScores
from kernels.sampler import choose_sampler, draw
from kernels.slots import NO_GRAMMARS, Slots
from kernels.step import BatchLike, StepLayout, StepResult
from kernels.stream import StreamPoint, send_up
from kernels.weights import Checkpoint, Progress, find_model, resolve_dtype

if TYPE_CHECKING:
    from kernels.gpu.steps import DeviceSteps


class ModelRunner:
    """Model, cache and slots of one worker. Steps and their results belong to one thread at a time; blocks are the
    caller's to give."""

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
        self._slots = Slots(max_num_seqs, max_model_len, cache.layout.block_size, model.config.vocab_size)
        self._before: LaunchedStep | None = None  # launched last, if that went well
        self._prepared_thread = -1
        self._device_steps: DeviceSteps | None = None
        if gpu is not None:
            # Nothing of a GPU is imported where there is none.
            from kernels.gpu.steps import make_device_steps

            self._device_steps = make_device_steps(model, cache, self._slots.tables, max_model_len, gpu)
            self._slots.table_changed = self._device_steps.blocks_changed

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

    @property
    def runs_ahead(self) -> bool:
        """Whether a batch may name tokens that the batch before it has yet to draw."""
        return self._device_steps is not None

    def run(self, batch: BatchLike) -> StepResult:
        """One step, waited for."""
        return self.launch(batch).result()

    def launch(self, batch: BatchLike) -> LaunchedStep:
        """One step: slots leave, join and grow; all rows are computed; rows that sample give one token each, rows of
        prompts to be scored the log-probabilities of the prompt tokens that follow theirs.

        A row's token id below 0, -1 - r, is what row r of the step launched before this one draws. Results are taken
        in the order of launches. Where this raises, nothing of the step runs any more.
        """
        self._prepare_thread()
        before, self._before = self._before, None
        with torch.inference_mode():
            try:
                self._slots.apply(batch, self.grammars)
                step = self._begin(batch, before)
            except BaseException:
                # Kernels of a step that stays half launched still write to blocks that others are given next.
                StreamPoint(self.model.device).wait()
                raise
        self._before = step
        return step

    def _prepare_thread(self) -> None:
        """Thread counts belong to the calling thread in OpenMP, so they are set in the thread that runs."""
        thread = threading.get_ident()
        if thread != self._prepared_thread:
            torch.set_num_threads(self._threads)
            self._prepared_thread = thread

    def _begin(self, batch: BatchLike, before: LaunchedStep | None) -> LaunchedStep:
        starts = np.asarray(batch.starts, dtype=np.int32)
        counts = np.asarray(batch.counts, dtype=np.int32)
        slots = np.asarray(batch.slots, dtype=np.int64)
        samples = np.asarray(batch.samples, dtype=bool)
        ends = starts + counts
        if not len(slots):
            return LaunchedStep(slots, ends, samples, over=StreamPoint(self.model.device))
        assert counts.min() >= 1 and ends.max() <= self.max_model_len
        self._slots.check_room(slots, ends)
        step = StepLayout(
            starts, counts, slots, self._slots.tables, self.layout.block_size, self.model.device
        )
        token_ids = np.asarray(batch.token_ids, dtype=np.int64)
        follows = self._follows(token_ids, step, before)
        rows = np.flatnonzero(samples)
        lasts = (step.firsts + counts - 1)[rows]
        hidden, of_rows = self._forward(token_ids, step, lasts)
        drawing, faults = None, dict[int, str]()
        if len(rows):
            logits_there = self.model.logits(of_rows)
            # A GPU still computes while the grammars say what they allow.
            draws, faults = self._slots.draws(
                rows.tolist(), slots[rows].tolist(), ends[rows].tolist(), token_ids[lasts].tolist()
            )
            if faults:
                whole = np.flatnonzero([row not in faults for row in rows.tolist()])
                rows, logits_there = rows[whole], logits_there[send_up(whole, logits_there.device)]
            drawing = draw(self._sampler, logits_there, list(draws.values()))
            if self._device_steps is not None and drawing.ids is not None:
                self._device_steps.sampled(rows, drawing.ids)
        slot_list = slots.tolist()
        return LaunchedStep(
            slots,
            ends,
            samples,
            drawing=drawing,
            drawn_rows=tuple(rows.tolist()),
            scores=self._score(slot_list, step, hidden),
            counting=self._slots.counting(slot_list),
            faults=faults,
            follows=follows,
            before=before,
            over=StreamPoint(self.model.device),
        )

    def _follows(
        self, token_ids: np.ndarray, step: StepLayout, before: LaunchedStep | None
    ) -> dict[int, int]:
        """By row: the row of the step before whose token it takes."""
        places = np.flatnonzero(token_ids < 0)
        if not len(places):
            return {}
        assert self._device_steps is not None and before is not None, "no step before has its tokens there"
        rows = np.searchsorted(step.firsts, places, side="right") - 1
        theirs = -1 - token_ids[places]
        goes_on = (before.slots[theirs] == step.slots[rows]) & (before.ends[theirs] == step.starts[rows])
        right = goes_on & before.samples[theirs] & (step.counts[rows] == 1)
        assert right.all(), "a row is not the next of the one it follows"
        return dict(zip(rows.tolist(), theirs.tolist(), strict=True))

    def _forward(
        self, token_ids: np.ndarray, step: StepLayout, lasts: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of the step's tokens, and those of tokens `lasts`."""
        if self._device_steps is not None:
            return self._device_steps.run(token_ids, step, lasts)
        device = self.model.device
        hidden = self.model.forward(torch.from_numpy(token_ids).to(device), step, self.cache)
        return hidden, hidden[torch.from_numpy(lasts).to(device)]

    def _score(self, slots: list[int], step: StepLayout, hidden: torch.Tensor) -> PromptScores | None:
        """Log-probabilities of prompt tokens, where a row has some to say."""
        prompts = self._slots.prompts_to_score(slots)
        if not prompts:
            return None
        return PromptScores(self.model, self._sampler, hidden, step, prompts)


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
    spare_threads: int = 0,
    progress: Progress | None = None,
    pool_memory: PoolMemory | None = None,
    gpu: OnGpu | None = None,
    backend: BackendName = "auto",
) -> ModelRunner:
    """Loads a model and makes its cache. Give `num_blocks` or `kv_cache_bytes`; a GPU is profiled without. The C
    kernels have `spare_threads` more than torch, which waits for each of its own, with a core or without.

    Raises `ModelNotFound` (no such model), `UnsupportedModel` (a field or tensor it does not honour) and
    `AskedTooMuch` (a length or a cache that cannot be had).
    """
    torch.set_num_threads(threads)
    place = resolve_device(device)
    folder = find_model(model_path)
    config = ModelConfig.from_folder(folder)
    length = _served_length(config, max_model_len)
    weight_dtype = resolve_dtype(dtype, config)
    gpu = gpu or OnGpu()
    choice = choose_backend(
        place,
        config.head_dim,
        block_size,
        threads + spare_threads,
        weight_dtype,
        length,
        backend,
        gpu.fast_chunks,
    )
    heads = (config.num_layers, config.num_kv_heads, config.head_dim)
    layout = CacheLayout(*heads, block_size, weight_dtype, token_major=choice.on_device)
    num_blocks = asked_blocks(layout, place, num_blocks, kv_cache_bytes)
    with torch.inference_mode(), Checkpoint(folder, config) as checkpoint:
        revision = checkpoint.revision()
        model = load_model(checkpoint, weight_dtype, place, choice, length, threads, progress, spare_threads)
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
