"""Linear layers in C (kernels/native/linear.h): weights packed once, a row's bits the same in every call.

Nothing is probed: every sum has one order by construction, whatever the row count, threads or neighbours. Products
have the weight's dtype, sums are fp32, the result is rounded once; so the output head multiplies bf16 by bf16 exactly
and gives fp32 logits without an fp32 copy of itself.
"""

from types import ModuleType

import torch

from kernels.cache import dtype_name, huge_pages

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# By the codes of linear.h, slowest first. `fma` is there in two widths with equal bits.
KINDS = ("plain", "fma", "fma", "dot", "amx")
_ALIGNMENT_BYTES = 64
_CHUNK_BYTES = 64 << 20


class PackedMemory:
    """Memory for many packed weights, in huge pages: a matrix alone is often smaller than one of them."""

    def __init__(self) -> None:
        self._chunk: torch.Tensor | None = None
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """`num_bytes` bytes at an address that is a multiple of 64. Pages that nobody writes take no memory."""
        if self._chunk is None or self._used + num_bytes > len(self._chunk):
            memory = huge_pages(max(num_bytes, _CHUNK_BYTES))
            self._chunk = torch.frombuffer(memory, dtype=torch.uint8)
            self._used = 0
        taken = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return taken


class NativeLinear:
    """`y = x @ weight.T + bias`, x `[rows, in]` in the weight's dtype, y `[rows, out]` in `out_dtype`."""

    def __init__(
        self,
        native: ModuleType,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        kind: int,
        threads: int,
        memory: PackedMemory,
    ) -> None:
        assert out_dtype in (weight.dtype, torch.float32) and (bias is None or len(bias) == len(weight))
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.out_dtype = out_dtype
        self.kind = kind
        self.bias = None if bias is None else bias.to(torch.float32, copy=True).contiguous()
        self._native = native
        self._threads = threads
        code = _DTYPE_CODES[weight.dtype]
        self.packed = memory.take(native.linear_packed_bytes(self.out_features, self.in_features, code))
        weight = weight.contiguous()
        native.linear_pack(
            weight.data_ptr(), self.out_features, self.in_features, code, self.packed.data_ptr()
        )
        self._weight = (
            self.out_features,
            self.in_features,
            code,
            kind,
            0 if self.bias is None else self.bias.data_ptr(),
            self.packed.data_ptr(),
        )

    @property
    def record(self) -> tuple[int, int, int, int, int, int]:
        """The fields of `linear` in linear.h; the addresses live as long as this object."""
        return self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, size = x.shape
        assert size == self.in_features and x.dtype == self.dtype and x.device.type == "cpu"
        x = x.contiguous()
        y = torch.empty((rows, self.out_features), dtype=self.out_dtype)
        self._native.linear_rows(
            *self._weight, x.data_ptr(), rows, y.data_ptr(), _DTYPE_CODES[self.out_dtype], self._threads
        )
        return y


class NativeProducts:
    """Makes the linear layers of a model. The kind of product is this processor's best, by dtype."""

    def __init__(self, native: ModuleType, threads: int, kind: int | None = None) -> None:
        """`kind`, an index of KINDS, is for tests: the best is taken without it."""
        self._native = native
        self._threads = threads
        self._kind = kind
        self._memory = PackedMemory()
        self._used: dict[torch.dtype, int] = {}

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> NativeLinear:
        kind = best_kind(self._native, weight.dtype) if self._kind is None else self._kind
        self._used[weight.dtype] = kind
        return NativeLinear(self._native, weight, bias, out_dtype, kind, self._threads, self._memory)

    def describe(self) -> dict[str, str]:
        """Dtype to kind: bits differ between workers that differ here."""
        return {dtype_name(dtype): f"native-{KINDS[kind]}" for dtype, kind in self._used.items()}


def best_kind(native: ModuleType, dtype: torch.dtype) -> int:
    return kinds_of(native, dtype)[-1]


def kinds_of(native: ModuleType, dtype: torch.dtype) -> list[int]:
    """What this processor has, slowest first."""
    return [kind for kind in range(len(KINDS)) if native.linear_has(kind, _DTYPE_CODES[dtype])]
