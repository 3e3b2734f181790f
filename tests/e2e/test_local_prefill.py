"""Prompts that decode workers compute themselves beside a prefill worker: the same answers, and no transfer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.service import Service, serving

AT_ONCE = 8


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Service]:
    flags = ("--local-prefill", "auto", "--kv-cache-memory", "128MiB")
    with serving(tmp_path_factory.mktemp("local") / "log", *flags) as service:
        yield service


def test_what_prefill_is_behind_with_is_computed_where_it_is_decoded_and_says_the_same(
    local: Service, shared: Service, text_ids: list[int]
) -> None:
    """Enough at once that the last would wait for seven others: whether one alone goes one way or the other is a
    matter of a few milliseconds, and of what else the machine does. Step times are known from the first request on."""

    def ask(service: Service, first: int) -> dict[str, Any]:
        prompt = text_ids[first : first + 200]
        return service.complete(prompt, max_tokens=6, logprobs=3, ignore_eos=True)

    before = local.counted("local_prefill_tokens_total", role="decode")
    prompts = [210 * number for number in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as several:
        answers = list(several.map(lambda first: ask(local, first), prompts))
    computed = local.counted("local_prefill_tokens_total", role="decode") - before
    assert 200 <= computed <= 200 * (AT_ONCE - 1), "both workers compute some of them"
    local.until_idle()
    for first, answer in zip(prompts, answers, strict=True):
        other = ask(shared, first)
        assert (answer["text"], answer["logprobs"]) == (other["text"], other["logprobs"])
