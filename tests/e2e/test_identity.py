"""The same requests to differently built services: every answer equal to the last bit of its log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.service import Service, serving

# Within a dtype, all of these must say the same. The first is the one compared with; of bfloat16 it is the service that
# other tests share, over shm, with whatever is in its caches.
BUILDS: dict[str, list[list[str]]] = {
    "bfloat16": [
        ["--prefill", "0", "--threads", "1"],
        ["--max-num-batched-tokens", "32", "--block-size", "32", "--transfer", "tcp"],
    ],
    "float32": [[], ["--prefill", "0", "--max-num-batched-tokens", "100", "--no-enable-prefix-caching"]],
}
SEEDED: dict[str, Any] = {"temperature": 1, "top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.2}


def ask_all(service: Service, text_ids: list[int]) -> list[dict[str, Any]]:
    """Alone, one after the other: lengths around block and chunk, every second one greedy."""
    answers = []
    for index, length in enumerate((1, 16, 33, 129, 300)):
        prompt = text_ids[13 * index : 13 * index + length]
        fields = {} if index % 2 else {**SEEDED, "seed": 10 + index}
        answers.append(service.complete(prompt, max_tokens=6, logprobs=5, **fields))
    chat = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Tell me a story."}]}
    extra = {"seed": 5, "max_tokens": 10, "logprobs": True, "top_logprobs": 5}
    answers.append(service.post("/v1/chat/completions", {**chat, **extra}).json()["choices"][0])
    return [{key: answer[key] for key in answer if key not in ("id", "usage")} for answer in answers]


def moved_over(service: Service) -> list[str]:
    service.counted("kv_transfer_bytes_total")
    return [name for name in ("shm", "tcp") if service.metric("kv_transfer_bytes_total", channel=name)]


@pytest.mark.parametrize("dtype", BUILDS)
def test_every_build_says_the_same(
    dtype: str, shared: Service, text_ids: list[int], tmp_path: Path, smollm2_dir: Path
) -> None:
    wanted = ask_all(shared, text_ids) if dtype == "bfloat16" else []
    assert not wanted or moved_over(shared) == ["shm"]
    for number, flags in enumerate(BUILDS[dtype]):
        memory = ["--kv-cache-memory", "96MiB"]
        with serving(tmp_path / f"{number}.log", "--dtype", dtype, *memory, *flags) as service:
            found = ask_all(service, text_ids)
            over = moved_over(service)
        assert all(answer["logprobs"] for answer in found)
        assert over == ([] if "--prefill" in flags else ["tcp"] if "tcp" in flags else ["shm"])
        wanted = wanted or found
        for one, other in zip(found, wanted, strict=True):
            assert one == other, flags
    texts = [answer.get("text") for answer in wanted]
    assert len(set(map(str, texts))) == len(texts), "answers that are all alike would prove nothing"
