"""Prompts that decode workers compute themselves beside a prefill worker: the same answers, and no transfer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.service import Service, serving

SHORT = 12


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Service]:
    flags = ("--local-prefill", "auto", "--kv-cache-memory", "128MiB")
    with serving(tmp_path_factory.mktemp("local") / "log", *flags) as service:
        yield service


def test_short_prompts_stay_where_they_are_decoded_and_say_the_same(
    local: Service, shared: Service, text_ids: list[int]
) -> None:
    """Longer ones first, so that both workers know their step times."""
    for number in range(6):
        local.complete(text_ids[300 * number : 300 * number + 260], max_tokens=8, ignore_eos=True)
    before = local.counted("local_prefill_tokens_total", role="decode")
    prompts = [text_ids[40 * number : 40 * number + SHORT] for number in range(8)]
    answers = [local.complete(prompt, max_tokens=6, logprobs=3, ignore_eos=True) for prompt in prompts]
    assert local.counted("local_prefill_tokens_total", role="decode") - before >= len(prompts) / 2
    local.until_idle()
    for prompt, answer in zip(prompts, answers, strict=True):
        other = shared.complete(prompt, max_tokens=6, logprobs=3, ignore_eos=True)
        assert (answer["text"], answer["logprobs"]) == (other["text"], other["logprobs"])
