"""Attention is compiled once by shape of the model, not again as batches and sequences grow: a wait amid serving."""

from __future__ import annotations

import os
import subprocess
import sys

# Compilers are not there under the interpreter, which this process chose: another one asks what would be compiled.
PROGRAM = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernels.gpu.attention import paged_attention
from kernels.gpu.device_step import DeviceStep
from kernels.gpu.tuning import Launch

backend, seen = make_backend(GPUTarget("cuda", 90, 32)), {}

def record(self, *arguments, grid, warmup, **keywords):
    bind = create_function_from_signature(self.signature, self.params, backend)
    bound, specialized, options = bind(*arguments, **keywords, debug=False, instrumentation_mode="")
    seen.setdefault(self.__name__, set()).add(str(specialized))

JITFunction.run = record
buffer = torch.zeros(4096, dtype=torch.int32)
pool = torch.empty(64, 2, 2, 8, 16, 128, dtype=torch.bfloat16, device="meta")
for count in (1, 3):
    for rows in (1, 2, 3, 4, 16, 17):
        for end in (100, 600, 8192, 8208):
            starts, counts, firsts = buffer[: 3 * rows].view(3, rows)  # as StepStaging lays them out
            tables = torch.zeros((rows, -(-end // 16)), dtype=torch.int32)
            tokens = buffer[: rows * count]
            step = DeviceStep(tables, starts, counts, firsts, tokens, tokens, count, end)
            q = torch.empty(rows * count, 32, 128, device="meta")
            paged_attention(q, pool, 1, step, Launch())
print(sorted((name, len(variants)) for name, variants in seen.items()))
"""


def test_batches_and_lengths_make_no_variants() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([("_chunk_kernel", 1), ("_combine_kernel", 1), ("_decode_kernel", 1)])
