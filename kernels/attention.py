"""Attention over the paged cache, torch reference: fp32, batch-invariant by construction, CPU and CUDA.

A query at position p attends to keys 0 to p of its own sequence. Keys are reduced in tiles of one block, at absolute
positions: inside a tile by a fixed tree of additions, over tiles one after the other. Nothing depends on how
many queries, rows or blocks share the call, so a decode step and a prompt chunk give a token the same bits.
Slow (it makes every product explicit), exact, and the yardstick for faster kernels.
"""

import torch

from kernels.cache import PagedCache
from kernels.elementary import exp_elementwise, tree_sum
from kernels.step import StepLayout

# Products held at once: 4 million fp32 numbers, 16 MB, stay near the caches.
_PRODUCT_ELEMENTS = 1 << 22


def store_kv(k: torch.Tensor, v: torch.Tensor, step: StepLayout, cache: PagedCache, layer: int) -> None:
    """Writes this step's keys and values, `[tokens, num_kv_heads, head_dim]`, to their places in the cache."""
    cache.store(layer, step.blocks, step.offsets, k, v)


def attend(q: torch.Tensor, step: StepLayout, cache: PagedCache, layer: int) -> torch.Tensor:
    """q `[tokens, num_heads, head_dim]` fp32 to attention output of the same shape, fp32."""
    out = torch.empty_like(q)
    block_size = cache.layout.block_size
    tables = torch.from_numpy(step.row_tables()).to(q.device).long()
    single = [row for row, count in enumerate(step.counts) if count == 1]
    for rows in _split(single, q.shape[1] * q.shape[2] * tables.shape[1] * block_size):
        tokens = torch.from_numpy(step.firsts[rows]).to(q.device).long()
        width = int(step.starts[rows].max()) // block_size + 1
        positions = step.positions[tokens].unsqueeze(1)
        out[tokens] = reference_attention(
            q[tokens].unsqueeze(1), tables[rows, :width], positions, cache, layer
        ).squeeze(1)
    for row, count in enumerate(step.counts):
        if count > 1:
            _attend_chunk(q, tables[row], step, row, cache, layer, out)
    return out


def _attend_chunk(
    q: torch.Tensor,
    table: torch.Tensor,
    step: StepLayout,
    row: int,
    cache: PagedCache,
    layer: int,
    out: torch.Tensor,
) -> None:
    """One row with many queries, a few at a time to bound memory."""
    first, count, start = int(step.firsts[row]), int(step.counts[row]), int(step.starts[row])
    block_size = cache.layout.block_size
    per_query = q.shape[1] * q.shape[2] * (start + count + block_size)
    at_once = max(1, _PRODUCT_ELEMENTS // per_query)
    for begin in range(first, first + count, at_once):
        end = min(begin + at_once, first + count)
        width = (start + end - first - 1) // block_size + 1
        out[begin:end] = reference_attention(
            q[begin:end].unsqueeze(0), table[None, :width], step.positions[None, begin:end], cache, layer
        ).squeeze(0)


def _split(rows: list[int], elements_per_row: int) -> list[list[int]]:
    at_once = max(1, _PRODUCT_ELEMENTS // max(elements_per_row, 1))
    return [rows[begin : begin + at_once] for begin in range(0, len(rows), at_once)]


def reference_attention(
    q: torch.Tensor, tables: torch.Tensor, positions: torch.Tensor, cache: PagedCache, layer: int
) -> torch.Tensor:
    """q `[rows, queries, num_heads, head_dim]` fp32, tables `[rows, tiles]`, positions `[rows, queries]`.

    Returns the same shape as q. A table may be longer than a query needs: tiles past its position add zeros.
    """
    rows, queries, heads, head_dim = q.shape
    kv_heads, block_size = cache.layout.num_kv_heads, cache.layout.block_size
    tiles = tables.shape[1]
    scaled = (q * head_dim**-0.5).view(rows, queries, kv_heads, heads // kv_heads, 1, head_dim, 1)
    key_positions = torch.arange(tiles * block_size, device=q.device).view(tiles, block_size)
    seen = key_positions <= positions.view(rows, queries, 1, 1)  # [rows, queries, tiles, block]
    # What lies past a sequence's end is left over from others and may even be NaN, so it is masked, not multiplied.
    held = key_positions <= positions.amax(dim=1).view(rows, 1, 1)
    keys = cache.keys(layer, tables).float()  # [rows, tiles, kv, dim, block]
    keys = torch.where(held.view(rows, tiles, 1, 1, block_size), keys, 0.0)
    values = cache.values(layer, tables).float()  # [rows, tiles, kv, block, dim]
    values = torch.where(held.view(rows, tiles, 1, block_size, 1), values, 0.0)

    # [rows, queries, kv, group, tiles, dim, block] summed over dim
    scores = tree_sum(scaled * keys.permute(0, 2, 1, 3, 4)[:, None, :, None], -2)
    mask = seen.view(rows, queries, 1, 1, tiles, block_size)
    scores = torch.where(mask, scores, -torch.inf)
    best = scores.amax(dim=(-1, -2), keepdim=True)
    weights = torch.where(mask, exp_elementwise(scores - best), 0.0)
    totals = tree_sum(weights, -1)  # [rows, queries, kv, group, tiles]
    # [rows, queries, kv, group, tiles, block, dim] summed over block
    sums = tree_sum(weights.unsqueeze(-1) * values.permute(0, 2, 1, 3, 4)[:, None, :, None], -2)

    total = torch.zeros_like(totals[..., 0])
    result = torch.zeros_like(sums[..., 0, :])
    for tile in range(tiles):
        total = total + totals[..., tile]
        result = result + sums[..., tile, :]
    return (result / total.unsqueeze(-1)).view(rows, queries, heads, head_dim)
