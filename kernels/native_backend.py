"""The small operations of a layer in C (kernels/native), for CPUs. Checks shapes; the C side sees addresses only."""

import importlib
from types import ModuleType

import torch

from kernels.cache import PagedCache
from kernels.rope import RopeTable
from kernels.step import StepLayout

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
VARIANTS = ("amx", "avx512", "avx2", "plain")
"""Fastest first."""


def load_native() -> ModuleType | None:
    """The extension, or None where it was not built (no compiler at install time)."""
    try:
        return importlib.import_module("kernels._native")
    except ImportError:
        return None


class NativeBackend:
    """`Backend` in C. `fits` says for which models; the others use torch.

    The avx512 and avx2 variants give equal bits. The plain one does not fuse multiply and add and amx rounds queries
    and attention weights to bf16, so each has its own name; amx differs from avx512 in attention over bf16 only.
    """

    LANES = 16
    on_device = False

    def __init__(
        self, native: ModuleType, threads: int, variant: str | None = None, takes_tiles: bool = True
    ) -> None:
        """The first variant that is there, or the one asked for. `takes_tiles`: amx would make a difference."""
        self.native = native
        self.threads = threads
        variants = VARIANTS if variant is None else (variant,)
        chosen = next((name for name in variants if native.use(name)), None)
        if chosen is None:
            raise ValueError(f"this processor has no {variant}")
        self.variant = chosen
        self.name = "native-plain" if chosen == "plain" else "native-fma"
        if chosen == "amx" and takes_tiles:
            self.name = "native-amx"

    @staticmethod
    def fits(head_dim: int, block_size: int) -> bool:
        return head_dim % NativeBackend.LANES == 0 and block_size % NativeBackend.LANES == 0

    @staticmethod
    def fits_tiles(head_dim: int, dtype: torch.dtype) -> bool:
        """What `amx_attention_fits` says in C."""
        return dtype == torch.bfloat16 and head_dim % 32 == 0 and head_dim <= 256

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        _check_rows(x, weight)
        tokens, size = x.shape
        code = DTYPE_CODES[x.dtype]
        self.native.rms_norm(
            x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), tokens, size, eps, code, self.threads
        )
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(x)
        _check_rows(x, weight)
        assert residual.shape == x.shape and residual.is_contiguous() and residual.dtype == x.dtype
        tokens, size = x.shape
        code = DTYPE_CODES[x.dtype]
        self.native.rms_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            tokens,
            size,
            eps,
            code,
            self.threads,
        )
        return out, residual

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        assert gate_up.is_contiguous() and gate_up.dim() == 2
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((tokens, size))
        code = DTYPE_CODES[gate_up.dtype]
        self.native.silu_mul(gate_up.data_ptr(), out.data_ptr(), tokens, size, code, self.threads)
        return out

    def rope_and_store(
        self,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        table: RopeTable,
        step: StepLayout,
        cache: PagedCache,
        layer: int,
    ) -> torch.Tensor:
        layout = cache.layout
        tokens, dim = step.num_tokens, layout.head_dim
        heads = qkv.shape[1] // dim - 2 * layout.num_kv_heads
        assert qkv.is_contiguous() and qkv.dtype == layout.dtype
        assert qkv.shape == (tokens, (heads + 2 * layout.num_kv_heads) * dim)
        q = torch.empty((tokens, heads, dim), dtype=torch.float32)
        self.native.rope_and_store(
            qkv.data_ptr(),
            q.data_ptr(),
            cache.tensor.data_ptr(),
            *_offsets(cache, layer),
            0 if norms is None else norms[0].data_ptr(),
            0 if norms is None else norms[1].data_ptr(),
            table.cos.data_ptr(),
            table.sin.data_ptr(),
            step.positions.data_ptr(),
            step.blocks.data_ptr(),
            step.offsets.data_ptr(),
            tokens,
            heads,
            layout.num_kv_heads,
            dim,
            layout.block_size,
            DTYPE_CODES[layout.dtype],
            eps,
            self.threads,
        )
        return q

    def attention(self, q: torch.Tensor, step: StepLayout, cache: PagedCache, layer: int) -> torch.Tensor:
        layout = cache.layout
        assert q.is_contiguous() and q.dtype == torch.float32 and q.shape[2] == layout.head_dim
        out = torch.empty(q.shape, dtype=layout.dtype)
        self.native.attention(
            q.data_ptr(),
            out.data_ptr(),
            cache.tensor.data_ptr(),
            *_offsets(cache, layer),
            step.tables.ctypes.data,
            step.tables.shape[1],
            step.slots.ctypes.data,
            step.starts.ctypes.data,
            step.counts.ctypes.data,
            step.firsts.ctypes.data,
            len(step.counts),
            q.shape[1],
            layout.num_kv_heads,
            layout.head_dim,
            layout.block_size,
            DTYPE_CODES[layout.dtype],
            self.threads,
        )
        return out.view(len(q), -1)


def _check_rows(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert x.is_contiguous() and x.dim() == 2
    assert weight.dtype == torch.float32 and weight.shape == (x.shape[1],)


def _offsets(cache: PagedCache, layer: int) -> tuple[int, int, int]:
    """Bytes: from block to block, and from a block's start to this layer's keys and values."""
    layout = cache.layout
    part = layout.num_kv_heads * layout.head_dim * layout.block_size * layout.dtype.itemsize
    return layout.block_bytes, 2 * layer * part, (2 * layer + 1) * part
