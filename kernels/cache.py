"""The paged KV cache: one tensor, one block = block_size tokens of every layer in one contiguous piece.

Shape `[num_blocks, num_layers, 2, num_kv_heads, head_dim * block_size]`; part 0 is K, part 1 is V. Inside a block
K lies transposed (`[head_dim, block_size]`: a score kernel takes one key per lane, so no sum crosses lanes) and V
as it comes (`[block_size, head_dim]`). In bf16 two neighbours of the summed dimension lie together (K
`[head_dim / 2, block_size, 2]`, V `[block_size / 2, head_dim, 2]`): the form that matrix units and bf16 dot products
take, and one in which plain lanes widen a number with one shift. On a GPU K lies as V does (`token_major`): a key's
numbers side by side are what its loads take together. Everyone else treats a block as opaque bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.block_bytes import copy_blocks
from kernels.shared_pool import CannotShare, PoolOnDevice

if TYPE_CHECKING:
    from kernels.gpu.block_copies import BlockCopies

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def torch_dtype(name: str) -> torch.dtype:
    """`bfloat16`, `float16` or `float32` as a torch dtype."""
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class AskedTooMuch(ValueError):
    """A flag asks for more than the model or this machine has; the message names it."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Sizes of one block. Two workers can exchange blocks when their `describe()` are equal."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    token_major: bool = False

    @property
    def block_elements(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.block_size

    @property
    def block_bytes(self) -> int:
        return self.block_elements * self.dtype.itemsize

    @property
    def together(self) -> int:
        """How many neighbours of the summed dimension lie side by side: 2 in bf16 where sizes are even, else 1."""
        even = self.head_dim % 2 == 0 and self.block_size % 2 == 0 and not self.token_major
        return 2 if even and self.dtype == torch.bfloat16 else 1

    def describe(self) -> dict[str, str | int]:
        inner = "k:dim,token|v:token,dim" if self.together == 1 else "k:dim/2,token,2|v:token/2,dim,2"
        if self.token_major:
            inner = "k:token,dim|v:token,dim"
        return {
            "kv_dtype": dtype_name(self.dtype),
            "kv_layout": f"block(layer,kv,head,({inner}))",
            "block_size": self.block_size,
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "block_bytes": self.block_bytes,
        }


PoolMemory = Callable[[int], mmap.mmap | None]
"""Memory of so many bytes for a pool on the CPU, None where there is none of this kind."""


def huge_pages(num_bytes: int) -> mmap.mmap:
    """Memory of its own mapping, in huge pages where the kernel allows.

    A layer's part of a block is a few kB, far from the next block's, and a step reads every weight: with 4 kB pages
    each costs a page walk.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class PagedCache:
    """`num_blocks` blocks on one device. Only the process that made it writes.

    `memory` is asked, on CPU, for memory of another kind than this process's own.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        memory: PoolMemory | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks = {num_blocks}: at least one is needed")
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim * layout.block_size)
        if self.device.type == "cpu":
            num_bytes = num_blocks * layout.block_bytes
            mapped = (memory(num_bytes) if memory is not None else None) or huge_pages(num_bytes)
            self.tensor = torch.frombuffer(mapped, dtype=layout.dtype).view(shape)
        else:
            self.tensor = torch.empty(shape, dtype=layout.dtype, device=self.device)
        self.tensor.fill_(0)  # touches every page now, so that no step pays for page faults later
        self._bytes = self.tensor.view(num_blocks, -1).view(torch.uint8)
        self._host = self._bytes.view(-1).numpy().data if self.device.type == "cpu" else None
        self._copies: BlockCopies | None = None
        if self._host is None:
            # Nothing of a GPU is imported where there is none.
            from kernels.gpu.block_copies import BlockCopies

            self._copies = BlockCopies(self._bytes)

    def store(
        self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Writes keys and values `[tokens, num_kv_heads, head_dim]` to their `blocks` and `offsets`, `[tokens]`."""
        layout, group = self.layout, self.layout.together
        k, v = k.to(layout.dtype), v.to(layout.dtype)
        if layout.token_major:
            both = self.token_major()[:, layer]
            both[blocks, 0, :, offsets], both[blocks, 1, :, offsets] = k, v
            return
        pairs = k.reshape(len(k), layout.num_kv_heads, layout.head_dim // group, group)
        self._parts(layer, 0, layout.head_dim, layout.block_size)[blocks, :, :, offsets] = pairs
        self._parts(layer, 1, layout.block_size, layout.head_dim)[
            blocks, :, offsets // group, :, offsets % group
        ] = v

    def keys(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """A copy `[*blocks, num_kv_heads, head_dim, block_size]` of one layer's keys."""
        if self.layout.token_major:
            return self.token_major()[:, layer, 0][blocks].transpose(-1, -2)
        return self._gather(layer, 0, blocks, self.layout.head_dim, self.layout.block_size)

    def values(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """A copy `[*blocks, num_kv_heads, block_size, head_dim]` of one layer's values."""
        return self._gather(layer, 1, blocks, self.layout.block_size, self.layout.head_dim)

    def token_major(self) -> torch.Tensor:
        """View `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, of such a cache."""
        layout = self.layout
        assert layout.token_major
        return self.tensor.view(*self.tensor.shape[:-1], layout.block_size, layout.head_dim)

    def _parts(self, layer: int, part: int, outer: int, inner: int) -> torch.Tensor:
        """View `[num_blocks, num_kv_heads, outer / together, inner, together]`."""
        group = self.layout.together
        return self.tensor[:, layer, part].view(self.num_blocks, -1, outer // group, inner, group)

    def _gather(self, layer: int, part: int, blocks: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
        there = self._parts(layer, part, outer, inner)[blocks]
        return there.transpose(-1, -2).reshape(*blocks.shape, -1, outer, inner)

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    def read_blocks(self, blocks: Sequence[int]) -> list[memoryview]:
        """The bytes of each: the cache's own memory on CPU; on other devices a copy that the next call overwrites."""
        for block in blocks:
            self._check(block)
        if self._copies is not None:
            return self._copies.read(blocks)
        return [self._on_host(block) for block in blocks]

    def write_blocks(self, blocks: Sequence[int], sources: Sequence[bytes | memoryview]) -> Sequence[int]:
        """Copies each source into the block beside it, none of them twice; checksums of the copies, XXH3
        (`block_bytes.py`). Raises ValueError where a source has not `block_bytes` bytes; some may then be written."""
        for block in blocks:
            self._check(block)
        if self._copies is not None:
            return self._copies.write(blocks, sources)
        return copy_blocks([self._on_host(block) for block in blocks], sources)

    @property
    def on_device(self) -> Callable[[], PoolOnDevice] | None:
        """Gives what shows the pool to other processes of this host, and reads theirs; may raise CannotShare. None for
        a cache on the CPU."""
        return None if self._copies is None else self._pool_on_device

    def _pool_on_device(self) -> PoolOnDevice:
        from kernels.gpu.device_pool import CudaPool
        from kernels.gpu.driver import Driver, DriverError

        assert self._copies is not None
        try:
            return CudaPool(self._bytes, self._copies, Driver())
        except DriverError as error:
            raise CannotShare(str(error)) from error

    def _on_host(self, block: int) -> memoryview:
        assert self._host is not None
        return self._host[block * self.block_bytes : (block + 1) * self.block_bytes]

    def device_block(self, block: int) -> torch.Tensor:
        """The bytes of one block where they lie, uint8 `[block_bytes]`."""
        self._check(block)
        return self._bytes[block]

    def _check(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} of {self.num_blocks}")
