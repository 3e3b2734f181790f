"""The small operations of a layer, behind one seam: torch everywhere, C where it was built.

Bits differ between backends (C fuses multiply and add), so the name goes into the fingerprint and two workers
exchange blocks only when they use the same.
"""

import logging
import os
from typing import Literal, Protocol

import torch

from kernels.activation import silu_mul
from kernels.attention import attend, store_kv
from kernels.cache import PagedCache
from kernels.native_backend import NativeBackend, load_native
from kernels.norm import rms_norm
from kernels.rope import RopeTable, rotate
from kernels.step import StepLayout

log = logging.getLogger(__name__)


class Backend(Protocol):
    """Every method is batch-invariant: a token's result depends on that token and its own cached keys alone."""

    name: str
    on_device: bool
    """Its kernels are a device's: they take a token-major cache, and read a step's arrays there."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x `[tokens, size]`; weights are fp32."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual); both inputs `[tokens, size]`, residual may be overwritten."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`[tokens, 2 * size]` to `[tokens, size]`."""
        ...

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
        """Norms (Qwen3) and rotates q and k, writes k and v to the cache, returns q.

        qkv `[tokens, (heads + 2 * kv_heads) * head_dim]`; q `[tokens, heads, head_dim]` fp32.
        """
        ...

    def attention(self, q: torch.Tensor, step: StepLayout, cache: PagedCache, layer: int) -> torch.Tensor:
        """q fp32 to `[tokens, heads * head_dim]` in the cache's dtype."""
        ...


class TorchBackend:
    """The reference kernels, on any device."""

    name = "torch"
    on_device = False

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up)

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
        kv_size = layout.num_kv_heads * layout.head_dim
        q, k, v = qkv.split([qkv.shape[1] - 2 * kv_size, kv_size, kv_size], dim=1)
        q = q.reshape(len(q), -1, layout.head_dim)
        k = k.reshape(len(k), -1, layout.head_dim)
        if norms is not None:
            q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
        cos, sin = table.cos[step.positions], table.sin[step.positions]
        store_kv(rotate(k.float(), cos, sin), v.reshape(k.shape), step, cache, layer)
        return rotate(q.float(), cos, sin)

    def attention(self, q: torch.Tensor, step: StepLayout, cache: PagedCache, layer: int) -> torch.Tensor:
        return attend(q, step, cache, layer).view(len(q), -1).to(cache.layout.dtype)


BackendName = Literal["auto", "native", "torch", "triton"]


def choose_backend(
    device: torch.device,
    head_dim: int,
    block_size: int,
    threads: int,
    dtype: torch.dtype,
    max_len: int = 8192,
    wanted: BackendName = "auto",
    fast_chunks: bool = False,
) -> Backend:
    """The fastest backend that was built and fits; the same for every worker of one model on a machine. Who gets the
    slow one is told why. `wanted`: for tests and comparisons; Triton on a CPU is its interpreter. `fast_chunks`: of a
    GPU's (`OnGpu`)."""
    if wanted == "torch":
        return TorchBackend()
    if wanted == "triton" or (wanted == "auto" and device.type == "cuda"):
        return _triton(device, head_dim, block_size, dtype, max_len, fast_chunks)
    if device.type != "cpu":
        return TorchBackend()
    native = load_native()
    if native is not None and NativeBackend.fits(head_dim, block_size):
        return NativeBackend(native, threads, takes_tiles=NativeBackend.fits_tiles(head_dim, dtype))
    why = "the C extension was not built"
    if native is not None:
        why = (
            f"head_dim {head_dim} and block size {block_size} must both be multiples of {NativeBackend.LANES}"
        )
    log.warning("attention runs in torch, 20 to 60 times slower than in C: %s", why)
    return TorchBackend()


def _triton(
    device: torch.device,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    max_len: int,
    fast_chunks: bool,
) -> Backend:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("Triton kernels run on a CPU in its interpreter alone: set TRITON_INTERPRET=1")
    # Nothing of Triton is imported where there is no GPU.
    from kernels.gpu.backend import TritonBackend, why_not
    from kernels.gpu.tuning import attention_launch

    why = why_not(head_dim, block_size)
    if why is None:
        return TritonBackend(attention_launch(head_dim, dtype, max_len, device), device, fast=fast_chunks)
    log.warning("the reference kernels of torch run, far slower than those in Triton: %s", why)
    return TorchBackend()
