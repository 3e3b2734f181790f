"""Rotary embedding of queries and keys, and the write of keys and values to the paged cache, in one pass, in Triton.

A program has one head of one token: a query head is rotated and handed on, a key head is rotated and stored, a value
head is stored. Models that norm queries and keys first (Qwen3) have it done here too. fp32 inside; operations are
rounded where those of the torch reference (`kernels/rope.py`, `kernels/norm.py`) are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.device_step import DeviceStep


@triton.jit
def _halves(x, weight, eps, half, HALF: tl.constexpr, NORMED: tl.constexpr):
    """A head's two halves in fp32, normed where the model does."""
    i = tl.arange(0, HALF)
    wanted = i < half
    raw_first = tl.load(x + i, mask=wanted, other=0.0)
    raw_second = tl.load(x + half + i, mask=wanted, other=0.0)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if NORMED:
        mean = tl.sum(first * first + second * second, axis=0) / (2 * half)
        inverse = 1.0 / tl.sqrt_rn(mean + eps)
        dtype = raw_first.dtype
        first = (first * inverse).to(dtype).to(tl.float32) * tl.load(weight + i, mask=wanted, other=0.0)
        second = (second * inverse).to(dtype).to(tl.float32) * tl.load(
            weight + half + i, mask=wanted, other=0.0
        )
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    return first, second


@triton.jit
def _put(target, first, second, half, HALF: tl.constexpr):
    i = tl.arange(0, HALF)
    dtype = target.dtype.element_ty
    tl.store(target + i, first.to(dtype), mask=i < half)
    tl.store(target + half + i, second.to(dtype), mask=i < half)


@triton.jit(do_not_specialize_on_alignment=("tables", "positions", "token_rows"))
def _rope_store_kernel(
    qkv, q_out, cos, sin, q_norm, k_norm, eps, pool, tables, positions, token_rows,
    heads, kv_heads, half, layer_base, part_stride, head_stride, block_stride, table_width,
    BLOCK: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, heads + 2 * KV heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    if position >= 0:  # else it pads a graph's batch
        i = tl.arange(0, HALF)
        wanted = i < half
        x = qkv + (token * (heads + 2 * kv_heads) + head) * 2 * half
        angles = position.to(tl.int64) * half + i
        row = tl.load(token_rows + token).to(tl.int64)
        block = tl.load(tables + row * table_width + position // BLOCK).to(tl.int64)
        place = pool + block * block_stride + layer_base + (position % BLOCK) * 2 * half
        if head < heads + kv_heads:
            c = tl.load(cos + angles, mask=wanted, other=0.0)
            s = tl.load(sin + angles, mask=wanted, other=0.0)
            if head < heads:
                first, second = _halves(x, q_norm, eps, half, HALF, NORMED)
                q_there = q_out + (token * heads + head) * 2 * half
                _put(q_there, first * c - second * s, second * c + first * s, half, HALF)
            else:
                first, second = _halves(x, k_norm, eps, half, HALF, NORMED)
                k_there = place + (head - heads) * head_stride
                _put(k_there, first * c - second * s, second * c + first * s, half, HALF)
        else:
            first = tl.load(x + i, mask=wanted, other=0.0).to(tl.float32)  # and back: exact
            second = tl.load(x + half + i, mask=wanted, other=0.0).to(tl.float32)
            _put(place + part_stride + (head - heads - kv_heads) * head_stride, first, second, half, HALF)


def rope_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    pool: torch.Tensor,
    layer: int,
    step: DeviceStep,
) -> torch.Tensor:
    """Rotates q and k, writes k and v to their places, returns q.

    qkv `[tokens, (heads + 2 * kv_heads) * dim]` contiguous; cos, sin `[length, dim / 2]` fp32; norms: weights `[dim]`,
    fp32, of q's and k's RMS norm; pool `[blocks, layers, 2, kv_heads, block_size, dim]`. q `[tokens, heads, dim]` fp32.
    Of tokens that pad a graph's batch nothing is written.
    """
    _, layers, _, kv_heads, block_size, dim = pool.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    assert qkv.is_contiguous() and pool.is_contiguous() and dim % 2 == 0 and 0 <= layer < layers
    assert (
        cos.is_contiguous()
        and cos.shape[1] * 2 == dim
        and sin.shape == cos.shape
        and len(qkv) == step.num_tokens
    )
    q = torch.empty((len(qkv), heads, dim), dtype=torch.float32, device=qkv.device)
    q_norm, k_norm = norms if norms is not None else (cos, cos)  # not read where there are none
    _rope_store_kernel[(len(qkv), heads + 2 * kv_heads)](
        qkv, q, cos, sin, q_norm, k_norm, eps, pool, step.tables, step.positions, step.token_rows,
        heads, kv_heads, dim // 2, layer * pool.stride(1), pool.stride(2), pool.stride(3), pool.stride(0),
        step.tables.stride(0),
        BLOCK=block_size, HALF=triton.next_power_of_2(dim // 2), NORMED=norms is not None,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return q
