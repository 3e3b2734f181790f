"""Blocks as bytes, and as what the kernels see."""

import pytest
import torch
import xxhash

from kernels.attention import store_kv
from kernels.cache import CacheLayout, PagedCache
from tests.kernels.steps import make_step

_LAYOUT = CacheLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=16, dtype=torch.bfloat16)


def test_a_block_is_one_contiguous_piece() -> None:
    cache = PagedCache(_LAYOUT, 4)
    assert _LAYOUT.block_bytes == 3 * 2 * 2 * 8 * 16 * 2
    assert cache.tensor.is_contiguous() and cache.tensor[2].numel() * 2 == _LAYOUT.block_bytes
    assert not cache.tensor.any()
    (view,) = cache.read_blocks([2])
    assert (view.nbytes, view.format, view.ndim) == (_LAYOUT.block_bytes, "B", 1)
    cache.tensor[2] = 1.0
    assert bytes(view[:2]) == b"\x80\x3f"  # the same memory, not a copy


def test_a_block_written_elsewhere_reads_the_same() -> None:
    source, target = PagedCache(_LAYOUT, 3), PagedCache(_LAYOUT, 5)
    source.tensor.normal_()
    one, two = source.read_blocks([1, 2])
    assert list(target.write_blocks([4], [one])) == [xxhash.xxh3_64_intdigest(one)]
    assert torch.equal(target.tensor[4], source.tensor[1])
    assert not target.tensor[:4].any()
    target.write_blocks([3, 0], [one, bytes(two)])
    assert torch.equal(target.tensor[[0, 3]], source.tensor[[2, 1]])
    for layer in range(3):
        there, here = torch.tensor([0]), torch.tensor([2])
        assert torch.equal(target.keys(layer, there), source.keys(layer, here))
        assert torch.equal(target.values(layer, there), source.values(layer, here))


def test_a_blocks_tensor_is_its_bytes_where_they_lie() -> None:
    cache = PagedCache(CacheLayout(2, 1, 4, 4, torch.float32), num_blocks=3)
    cache.write_blocks([1], [bytes(range(256))])
    assert bytes(cache.device_block(1).numpy()) == bytes(range(256))
    cache.device_block(1).zero_()
    assert [bytes(view) for view in cache.read_blocks([1, 2])] == [bytes(256)] * 2
    with pytest.raises(IndexError):
        cache.device_block(3)


def test_wrong_sizes_and_places_are_refused() -> None:
    cache = PagedCache(_LAYOUT, 2)
    with pytest.raises(ValueError):
        cache.write_blocks([0], [bytes(_LAYOUT.block_bytes - 1)])
    for block in (-1, 2):
        with pytest.raises(IndexError):
            cache.read_blocks([0, block])
        with pytest.raises(IndexError):
            cache.write_blocks([block], [bytes(_LAYOUT.block_bytes)])
    with pytest.raises(ValueError, match="num_blocks"):
        PagedCache(_LAYOUT, 0)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "together"), [(torch.bfloat16, 8, 2), (torch.float16, 8, 1), (torch.bfloat16, 7, 1)]
)
def test_keys_and_values_land_at_their_token(dtype: torch.dtype, head_dim: int, together: int) -> None:
    layout = CacheLayout(3, 2, head_dim, 16, dtype)
    assert layout.together == together
    cache = PagedCache(layout, 4)
    step = make_step([(10, 10)], [[3, 1]], 16)
    k, v = torch.randn(10, 2, head_dim), torch.randn(10, 2, head_dim)
    store_kv(k, v, step, cache, layer=1)
    for token, position in enumerate(range(10, 20)):
        block, offset = torch.tensor([3, 1][position // 16]), position % 16
        assert torch.equal(cache.keys(1, block)[:, :, offset], k[token].to(dtype))
        assert torch.equal(cache.values(1, block)[:, offset], v[token].to(dtype))
    assert not cache.tensor[:, [0, 2]].any() and not cache.tensor[[0, 2]].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [8, 7])
def test_a_gpus_keys_lie_by_token_as_values_do(dtype: torch.dtype, head_dim: int) -> None:
    """What its kernels read is the memory itself, so the pool is looked at as they do, not through the cache."""
    layout = CacheLayout(3, 2, head_dim, 16, dtype, token_major=True)
    assert layout.together == 1
    assert layout.describe()["kv_layout"] == "block(layer,kv,head,(k:token,dim|v:token,dim))"
    assert layout.block_bytes == CacheLayout(3, 2, head_dim, 16, dtype).block_bytes
    cache = PagedCache(layout, 4)
    step = make_step([(10, 10)], [[3, 1]], 16)
    k, v = torch.randn(10, 2, head_dim), torch.randn(10, 2, head_dim)
    store_kv(k, v, step, cache, layer=1)
    pool = cache.tensor.view(4, 3, 2, 2, 16, head_dim)
    for token, position in enumerate(range(10, 20)):
        block, offset = [3, 1][position // 16], position % 16
        assert torch.equal(pool[block, 1, 0, :, offset], k[token].to(dtype))
        assert torch.equal(pool[block, 1, 1, :, offset], v[token].to(dtype))
        there = torch.tensor(block)
        assert torch.equal(cache.keys(1, there)[:, :, offset], k[token].to(dtype))
        assert torch.equal(cache.values(1, there)[:, offset], v[token].to(dtype))
    assert not cache.tensor[:, [0, 2]].any() and not cache.tensor[[0, 2]].any()
    assert cache.token_major().data_ptr() == cache.tensor.data_ptr()
    assert torch.equal(cache.token_major(), pool)
