"""A prompt of 200 kB while twenty streams run: health answers, and the streams' gaps stay what they were."""

from __future__ import annotations

import itertools
import threading
import time

import httpx

from tests.e2e.service import Service, completion, streamed

NUM_STREAMS = 20
TRIES = 3
HEALTH_LIMIT_S = 0.1
LARGE = ("The ferry crosses the river twice a day, whatever the weather. " * 3200)[:200_000]


def p99_gap_s(service: Service, prompts: list[list[int]]) -> float:
    """Of all gaps between the pieces of twenty streams that run at once."""
    gaps_s: list[float] = []

    def run(prompt: list[int]) -> None:
        seen_s: list[float] = []
        streamed(
            service.url, prompt, lambda _: seen_s.append(time.monotonic()), max_tokens=24, ignore_eos=True
        )
        gaps_s.extend(later - earlier for earlier, later in itertools.pairwise(seen_s[1:]))

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    gaps_s.sort()
    assert len(gaps_s) > 15 * NUM_STREAMS
    return gaps_s[int(0.99 * len(gaps_s))]


def large_prompts(service: Service, stop: threading.Event, statuses: list[int]) -> None:
    with httpx.Client(timeout=60) as client:
        while not stop.wait(0.3):
            statuses.append(client.post(service.url + "/v1/completions", json=completion(LARGE)).status_code)


def slowest_health_s(service: Service, stop: threading.Event, found_s: list[float]) -> None:
    with httpx.Client(timeout=60) as client:
        while not stop.wait(0.02):
            started_s = time.monotonic()
            assert client.get(service.url + "/health").status_code == 200
            found_s.append(time.monotonic() - started_s)


def test_large_prompts_stop_nobody(undisturbed: Service, text_ids: list[int]) -> None:
    """Other work may share the machine, so the best of a few tries counts; a loop that stood still would show in
    each of them."""
    prompts = [text_ids[40 * i : 40 * i + 20] for i in range(NUM_STREAMS)]
    p99_gap_s(undisturbed, prompts)  # prompts are cached from here on, so that the two to compare are alike
    tries: list[tuple[float, float, float]] = []
    for _ in range(TRIES):
        usual_s = p99_gap_s(undisturbed, prompts)
        stop, statuses, health_s = threading.Event(), list[int](), list[float]()
        beside = [
            threading.Thread(target=large_prompts, args=(undisturbed, stop, statuses)),
            threading.Thread(target=slowest_health_s, args=(undisturbed, stop, health_s)),
        ]
        for thread in beside:
            thread.start()
        disturbed_s = p99_gap_s(undisturbed, prompts)
        stop.set()
        for thread in beside:
            thread.join(60)
        assert set(statuses) == {400} and len(health_s) > 10
        tries.append((usual_s, disturbed_s, max(health_s)))
        if disturbed_s < 3 * usual_s and tries[-1][2] < HEALTH_LIMIT_S:
            return
    raise AssertionError(f"(usual p99 gap, beside 200 kB prompts, slowest /health) in s: {tries}")
