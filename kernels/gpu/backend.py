"""The small operations of a layer and attention, in Triton: `Backend` on a GPU, over a token-major cache."""

from __future__ import annotations

import torch

from kernels.cache import PagedCache
from kernels.gpu.attention import paged_attention
from kernels.gpu.norms import add_rms_norm, rms_norm
from kernels.gpu.rope_store import rope_store
from kernels.gpu.silu_mul import silu_mul
from kernels.gpu.tuning import Launch, describe
from kernels.rope import RopeTable
from kernels.step import StepLayout

MAX_HEAD_DIM = 256


def why_not(head_dim: int, block_size: int) -> str | None:
    """Why a model cannot have these kernels; None: it can."""
    if head_dim > MAX_HEAD_DIM or head_dim % 2:
        return f"head_dim {head_dim} is odd or over {MAX_HEAD_DIM}"
    if block_size & (block_size - 1):
        return f"block size {block_size} is no power of two"
    return None


class TritonBackend:
    """`Backend` (kernels/backend.py). `fast`: chunks in large tiles, whose bits are not those of decode rows."""

    on_device = True

    def __init__(self, launch: Launch, device: torch.device, *, fast: bool = False) -> None:
        self._launch = launch
        self._fast = fast
        self.name = f"triton:{describe(launch, device)}{':fast' if fast else ''}"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x.contiguous(), weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x.contiguous(), residual, weight, eps), residual

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up.contiguous())

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
        pool = cache.token_major()
        return rope_store(qkv.contiguous(), table.cos, table.sin, norms, eps, pool, layer, step.on_device)

    def attention(self, q: torch.Tensor, step: StepLayout, cache: PagedCache, layer: int) -> torch.Tensor:
        out = paged_attention(q, cache.token_major(), layer, step.on_device, self._launch, fast=self._fast)
        return out.view(len(q), -1)
