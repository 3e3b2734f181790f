"""Loads a server: by `python -m bench`, the same client for every side, and by the peer's own as a witness.

No server sees a seed twice: a prefix cache makes a repeated run look fast.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.against_peer.servers import Target

INPUT_LEN, OUTPUT_LEN = 256, 64
WARMUPS = 16
LIMIT_S = 1800.0


class LoadFault(Exception):
    """A run brought no figures; the message says why."""


def measure(
    target: Target,
    path: Path,
    *,
    rate: float,
    prompts: int,
    concurrency: int | None,
    targets: Sequence[str],
    extra_body: str = "",
    seed: int | None = None,
) -> dict[str, Any]:
    """One run; what `--save-result` wrote, at `path` too. `seed`: of arrivals and prompts; None: a new one. Raises
    LoadFault."""
    command = [sys.executable, "-m", "bench", "--base-url", target.url, "--model", target.model]
    command += ["--input-len", str(INPUT_LEN), "--output-len", str(OUTPUT_LEN)]
    command += ["--request-rate", f"{rate:g}", "--num-prompts", str(prompts), "--num-warmups", "4"]
    command += ["--goodput", *targets, "--no-progress", "--save-result", str(path)]
    if extra_body:
        command += ["--extra-body", extra_body]
    if seed is not None:
        command += ["--seed", str(seed)]
    if concurrency is not None:
        command += ["--max-concurrency", str(concurrency)]
    said = _run(command)
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LoadFault(f"{' '.join(command)}: {error}: {said[-600:]}") from error
    return result


def warm(target: Target, path: Path, targets: Sequence[str]) -> None:
    """Sixteen at once, thrown away: the first requests of a server compile and allocate."""
    measure(target, path, rate=float("inf"), prompts=WARMUPS, concurrency=WARMUPS, targets=targets)
    path.unlink()


def witness(
    peers: Path, venv: Path, tokenizer: Path, target: Target, *, prompts: int, concurrency: int
) -> tuple[float, int]:
    """Requests per second and failures of a saturated run, as `vllm bench serve` counts them. Raises LoadFault."""
    seed = str(secrets.randbelow(10**6))
    command = [
        "bash",
        str(peers / "load.sh"),
        str(venv),
        str(tokenizer),
        target.url,
        target.model,
        "inf",
        seed,
    ]
    return parse_witness(_run([*command, str(prompts), str(concurrency), str(INPUT_LEN), str(OUTPUT_LEN)]))


def parse_witness(said: str) -> tuple[float, int]:
    """From 'Failed requests=0 ; Request throughput (req/s)=4.48 ; …'."""
    rate = re.search(r"Request throughput \(req/s\)=([\d.]+)", said)
    failed = re.search(r"Failed requests=(\d+)", said)
    if rate is None:
        raise LoadFault(f"the peer's own client said no throughput: {said.strip()[-600:]}")
    return float(rate[1]), int(failed[1]) if failed else 0


def _run(command: list[str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise LoadFault(f"not done within {LIMIT_S:g} s: {' '.join(command)}") from None
    if ended.returncode != 0:
        raise LoadFault(
            f"{' '.join(command)} ended with {ended.returncode}: {(ended.stderr or ended.stdout)[-600:]}"
        )
    return ended.stdout
