"""How Triton kernels are launched: tile sizes, warps and stages, by a small table that a measured file may overrule.

Tiles and warps of a reduction decide the order in which it adds, so they decide bits. Whatever is chosen is so for
every batch of a process, and `describe` goes into the fingerprint: two workers exchange blocks only when theirs are
equal. No autotuner picks per process. The table's values were chosen by reasoning on shared memory and registers of
sm_80 and sm_90; a file that somebody wrote by measuring on a GPU (`bench/gpu_check.sh --tune`) replaces them there:

    ${XDG_CACHE_HOME:-~/.cache}/kvferry/tuning/<GPU>-triton<version>.json
    {"attention": {"keys": 64, "warps": 4, "stages": 2}, …}
"""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """Of attention. `rows`: query rows (tokens times the heads that share a KV head) of a program; `keys`: of one tile;
    `split`: keys that are reduced by themselves, at absolute positions, then merged in order. All powers of two."""

    rows: int = 16
    keys: int = 64
    split: int = 512
    warps: int = 4
    stages: int = 2

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or value < 1 or (value & (value - 1) and name != "stages"):
                raise ValueError(f"{name} = {value!r}: a power of two is wanted")
        if self.rows < 16 or self.keys < 16:
            raise ValueError(f"rows = {self.rows}, keys = {self.keys}: a matrix unit takes 16 at least")
        if self.split % self.keys:
            raise ValueError(f"split = {self.split} is no multiple of keys = {self.keys}")


WIDE_MEASURED = 256
"""Bytes of a head in what is measured (128 in bf16): the tiles of a wider one might not fit where those do."""

SPLITS_AT_MOST = 64
"""Of the longest sequence: what a decode step keeps of each, in fp32, grows with it."""


def attention_launch(head_dim: int, dtype: torch.dtype, max_len: int, device: torch.device) -> Launch:
    """The invariant kernels', for decode rows and chunks alike: one instruction class and one order for both."""
    wide = head_dim * dtype.itemsize
    launch = Launch(keys=64 if wide <= 256 else 32)  # a tile of K and of V, two stages: 64 kB at most
    if wide <= WIDE_MEASURED:
        launch = replace(launch, **measured(device).get("attention", {}))
    split = launch.split
    while split * SPLITS_AT_MOST < max_len:
        split *= 2
    return replace(launch, split=split)


def large_tiles(launch: Launch) -> Launch:
    """For chunks where bits need not be those of decode rows (`fast`)."""
    return replace(launch, rows=64, warps=8)  # more rows, or fewer warps, spill registers


def describe(launch: Launch, device: torch.device) -> str:
    """For the fingerprint: what decides bits, the compiler and the chip it compiles for included."""
    import triton

    chip = "interpreter"
    if device.type == "cuda":
        chip = "sm{}{}".format(*torch.cuda.get_device_capability(device))
    how = f"rows={launch.rows},keys={launch.keys},split={launch.split},warps={launch.warps},stages={launch.stages}"
    return f"{chip}:{triton.__version__}:{how}"


@cache
def measured(device: torch.device) -> dict[str, dict[str, int]]:
    """What the file of this GPU says, by kernel; nothing where there is none, or a bad one, which is named."""
    if device.type != "cuda":
        return {}
    path = tuning_file(torch.cuda.get_device_name(device))
    try:
        return read_tuning(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s is not used: %s", path, error)
        return {}


def tuning_file(gpu: str) -> Path:
    import triton

    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (
        home / "kvferry" / "tuning" / f"{re.sub('[^A-Za-z0-9]+', '-', gpu)}-triton{triton.__version__}.json"
    )


def read_tuning(path: Path) -> dict[str, dict[str, int]]:
    """Raises FileNotFoundError, OSError, and ValueError where it is not of the form above."""
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or not all(isinstance(values, dict) for values in found.values()):
        raise ValueError("not a table of tables")
    for kernel, values in found.items():
        if kernel != "attention":
            raise ValueError(f"no kernel is called {kernel!r}; attention is")
        try:
            replace(Launch(), **values)
        except TypeError as error:
            raise ValueError(f"{kernel}: {error}") from error
    return found
