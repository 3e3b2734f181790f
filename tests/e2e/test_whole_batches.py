"""Request-level batching in real processes: from the flags to the worker that forms its batches."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from tests.e2e.service import Service, serving, streamed

TIMEOUT_S = 0.4


@dataclass
class Heard:
    """When each piece of one answer came."""

    sent: float
    at: list[float] = field(default_factory=list)
    begun: Event = field(default_factory=Event)
    text: str = ""

    def piece(self, _: str) -> None:
        self.at.append(time.monotonic())
        self.begun.set()


def ask(pool: ThreadPoolExecutor, service: Service, prompt: list[int], max_tokens: int) -> Heard:
    heard = Heard(time.monotonic())

    def listen() -> None:
        heard.text = streamed(service.url, prompt, heard.piece, max_tokens=max_tokens, ignore_eos=True)

    pool.submit(listen)
    return heard


def test_a_batch_waits_for_its_timeout_and_nobody_joins_it(
    tmp_path: Path, smollm2_dir: Path, text_ids: list[int]
) -> None:
    """Two of four come in time. The third comes while they run, and starts when both have ended; alone, it says the
    same."""
    flags = ("--prefill", "0", "--batching", "dynamic", "--batch-timeout-ms", f"{TIMEOUT_S * 1e3:g}")
    with serving(tmp_path / "log", *flags, "--max-num-seqs", "4", "--kv-cache-memory", "128MiB") as service:
        with ThreadPoolExecutor(3) as pool:
            one = ask(pool, service, text_ids[:40], 50)
            two = ask(pool, service, text_ids[100:160], 40)
            assert one.begun.wait(60)
            three = ask(pool, service, text_ids[200:240], 5)
        assert one.at[0] - one.sent >= TIMEOUT_S
        assert three.sent < min(one.at[-1], two.at[-1]), "the batch was to run still when the third was sent"
        assert three.at[0] > max(one.at[-1], two.at[-1])
        alone = streamed(service.url, text_ids[200:240], max_tokens=5, ignore_eos=True)
        assert alone == three.text
