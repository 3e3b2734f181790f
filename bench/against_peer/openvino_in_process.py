"""OpenVINO GenAI's continuous batching, called in process: so many requests at once until all are answered.

Run by the Python of OpenVINO's own venv, which has nothing of kvferry: openvino_in_process.py GGUF BUDGET REQUESTS.
Prints one line of JSON. No HTTP and no client beside it, and a KV cache of the precision that it chooses itself: both
are in its favour.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from itertools import pairwise
from random import Random
from typing import Any

AT_ONCE, INPUT_LEN, OUTPUT_LEN, WARMUPS = 16, 256, 64, 16
TOKEN_IDS = (1000, 30_000)
CACHE_GB = 2


def pipeline(gguf: str, budget: int) -> Any:
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_seqs = AT_ONCE
    scheduler.max_num_batched_tokens = budget
    return genai.ContinuousBatchingPipeline(gguf, scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})


def run(pipe: Any, requests: int, seed: int) -> tuple[float, list[list[float]]]:
    """Seconds, and for each request when it began and when each token could be read."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = OUTPUT_LEN
    config.ignore_eos = True
    config.do_sample = False
    random = Random(seed)
    live: dict[int, Any] = {}
    stamps: list[list[float]] = []
    began = time.perf_counter()
    while live or len(stamps) < requests:
        while len(live) < AT_ONCE and len(stamps) < requests:
            ids = np.array([[random.randrange(*TOKEN_IDS) for _ in range(INPUT_LEN)]], dtype=np.int64)
            live[len(stamps)] = pipe.add_request(len(stamps), ov.Tensor(ids), config)
            stamps.append([time.perf_counter()])
        pipe.step()
        for number, handle in list(live.items()):
            while handle.can_read():
                tokens = sum(len(output.generated_ids) for output in handle.read().values())
                stamps[number] += [time.perf_counter()] * tokens
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del live[number]
    return time.perf_counter() - began, stamps


def main() -> None:
    gguf, budget, requests = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pipe = pipeline(gguf, budget)
    run(pipe, WARMUPS, secrets.randbits(32))
    seconds, stamps = run(pipe, requests, secrets.randbits(32))
    assert all(len(of) == OUTPUT_LEN + 1 for of in stamps), sorted({len(of) - 1 for of in stamps})
    gaps = sorted(later - earlier for of in stamps for earlier, later in pairwise(of[1:]))
    first = sorted(of[1] - of[0] for of in stamps)
    print(
        json.dumps(
            {
                "requests_per_s": requests / seconds,
                "requests": requests,
                "ttft_p50_ms": first[len(first) // 2] * 1e3,
                "itl_p50_ms": gaps[len(gaps) // 2] * 1e3,
                "itl_p99_ms": gaps[int(len(gaps) * 0.99)] * 1e3,
            }
        )
    )


if __name__ == "__main__":
    main()
