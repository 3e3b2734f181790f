"""Compiles Triton kernels for a GPU that is not there, as their wrappers launch them, and says what the code needs.

A wrapper is called on meta tensors while launches are recorded instead of made: argument types, divisibility by 16,
constants, warps and stages are then those of a real launch, and no list of signatures can grow old beside the code.
Triton's own compiler and its ptxas do the rest. It leans on insides of Triton 3.7 (how a launch becomes a signature),
and works only in a process that did not choose Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

CAPABILITIES = (80, 90)
INEXACT_F32 = re.compile(
    r"\b(?:fma|(?:div|rcp|sqrt|rsqrt|ex2|lg2|sin|cos|tanh)\.(?:full|approx))[.\w]*\.f32\b"
)
"""Instructions whose result is not that of one operation rounded once."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A launch that was not made."""

    kernel: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Registers by thread, bytes by program. `mma`: classes of matrix instructions in the PTX; `fma_f64`: how many
    fused float64 operations; `inexact_f32`: fused or approximate ones in float32; `block_loads`: loads of block numbers
    in Triton's own code; `narrow_products`: lines of it that multiply one in 32 bits."""

    kernel: str
    capability: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    warps: int
    mma: tuple[str, ...]
    fma_f64: int
    inexact_f32: tuple[str, ...]
    block_loads: int
    narrow_products: tuple[str, ...]


@contextlib.contextmanager
def recording() -> Iterator[list[Recorded]]:
    """Kernels launched inside are not run. Raises RuntimeError under the interpreter, which has no launches."""
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: nothing is compiled in this process")
    found: list[Recorded] = []

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        found.append(Recorded(self, arguments, keywords))

    kept = JITFunction.run
    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = kept


def launches_of(call: Callable[[], object]) -> list[Recorded]:
    """What a wrapper, called on meta tensors, would launch. Raises RuntimeError where that is nothing."""
    with recording() as found:
        call()
    if not found:
        raise RuntimeError("nothing was launched")
    return found


def compile_for(launch: Recorded, capability: int) -> Compiled:
    """To machine code; raises Triton's errors and those of ptxas."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    keywords = {**launch.keywords, "debug": False, "instrumentation_mode": ""}
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound, specialization, options = bind(*launch.arguments, **keywords)
    options, signature, constants, attributes = launch.kernel._pack_args(
        backend, keywords, bound, specialization, options
    )
    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = True  # what was compiled before has no log
        knobs.nvidia.dump_ptxas_log = True
        source = ASTSource(launch.kernel, signature, constants, attributes)
        made = triton.compile(source, target=target, options=options.__dict__)
    return _read(launch.kernel.__name__, capability, made, log.getvalue())


def _read(name: str, capability: int, made: Any, log: str) -> Compiled:
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise RuntimeError(f"{name}: ptxas said nothing of registers or spills: {log!r}")
    ptx = made.asm["ptx"]
    block_loads, narrow = _block_numbers(made.asm["ttir"], "tables")
    return Compiled(
        kernel=name,
        capability=capability,
        registers=int(registers[1]),
        spill_bytes=int(spills[1]) + int(spills[2]),
        shared_bytes=made.metadata.shared,
        warps=made.metadata.num_warps,
        mma=tuple(sorted(set(re.findall(r"\b(?:wgmma|mma)\S*?\.(?:m\d+n\d+k\d+)", ptx)))),
        fma_f64=len(re.findall(r"\bfma\.\w+\.f64", ptx)),
        inexact_f32=tuple(sorted(set(INEXACT_F32.findall(ptx)))),
        block_loads=block_loads,
        narrow_products=narrow,
    )


def _block_numbers(ir: str, argument: str) -> tuple[int, tuple[str, ...]]:
    """Follows what is loaded through a pointer argument, line by line, until it is made 64 bits wide. Returns how many
    loads there are, and the lines that multiply before that: a block's number times its elements overflows there."""
    pointers, numbers = {f"%{argument}"}, set()
    loads, narrow = 0, []
    for line in ir.splitlines():
        match = re.match(r"\s*(%\w+)(?::\d+)? = \"?([\w.]+)\"?(.*)", line)
        if match is None:
            continue
        result, operation, rest = match.groups()
        operands = set(re.findall(r"%\w+", rest))
        if operation == "tt.load" and operands & pointers:
            loads += 1
            numbers.add(result)
        elif operands & pointers:
            pointers.add(result)
        elif operands & numbers and operation != "arith.extsi":
            numbers.add(result)
            if operation == "arith.muli":
                narrow.append(line.strip())
    return loads, tuple(narrow)
