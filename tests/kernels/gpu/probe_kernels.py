"""Kernels that break a rule of the ahead-of-time compile, and others that keep it; `python -m` prints what is seen."""

# ruff: noqa: ANN001, ANN201 (what Triton compiles has no types of Python)
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import json
from dataclasses import asdict

import torch
import triton
import triton.language as tl

from kernels.gpu.ahead_of_time import CAPABILITIES, compile_for, launches_of


@triton.jit
def multiply_add(x, out):
    i = tl.arange(0, 32)
    tl.store(out + i, tl.load(x + i) * 3.7 + tl.load(x + 32 + i))


@triton.jit
def divide(x, out, ONCE: tl.constexpr):
    i = tl.arange(0, 32)
    above, below = tl.load(x + i), tl.load(x + 32 + i)
    tl.store(out + i, tl.div_rn(above, below) if ONCE else above / below)


@triton.jit
def block_at(pool, tables, out, stride, WIDE: tl.constexpr):
    block = tl.load(tables + tl.program_id(0))
    if WIDE:
        block = block.to(tl.int64)
    tl.store(out + tl.program_id(0), tl.load(pool + block * stride))


@triton.jit
def crowded(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    held = tl.load(x + i)  # all of it is wanted again after the sum
    tl.store(out + i, held / tl.sum(held, axis=0))


def main() -> None:
    doubles = torch.empty(64, dtype=torch.float64, device="meta")
    floats = torch.empty(4096, device="meta")
    ints = torch.empty(64, dtype=torch.int32, device="meta")
    calls = {
        "fused": lambda: multiply_add[(1,)](doubles, doubles, num_warps=1),
        "unfused": lambda: multiply_add[(1,)](doubles, doubles, num_warps=1, enable_fp_fusion=False),
        "fused f32": lambda: multiply_add[(1,)](floats, floats, num_warps=1),
        "divided": lambda: divide[(1,)](floats, floats, ONCE=False, num_warps=1, enable_fp_fusion=False),
        "divided once": lambda: divide[(1,)](floats, floats, ONCE=True, num_warps=1, enable_fp_fusion=False),
        "narrow": lambda: block_at[(4,)](ints, ints, ints, 77, WIDE=False),
        "wide": lambda: block_at[(4,)](ints, ints, ints, 77, WIDE=True),
        "spilling": lambda: crowded[(1,)](floats, floats, SIZE=4096, num_warps=1, maxnreg=32),
    }
    found = {
        name: [asdict(compile_for(launch, CAPABILITIES[0])) for launch in launches_of(call)]
        for name, call in calls.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
