"""Text to ask about, in pieces that share no beginning, and one service that many tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.e2e.service import Service, serving

LICENSE = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="session")
def text_ids(smollm2_dir: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    return list(tokenizer.encode(LICENSE.read_text(), add_special_tokens=False).ids)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Service]:
    """One prefill and one decode worker, for every test that leaves them as it found them. Its log is looked
    through for faults when it stops."""
    with serving(tmp_path_factory.mktemp("shared") / "log", "--kv-cache-memory", "256MiB") as service:
        yield service


def witness(service: Service, text_ids: list[int], **fields: Any) -> dict[str, Any]:
    """An answer that is the same to the last bit whenever, and beside whomever, it is asked for."""
    answer = service.complete(text_ids[700:740], max_tokens=3, logprobs=5, ignore_eos=True, **fields)
    return {key: answer[key] for key in ("text", "logprobs", "finish_reason")}


@pytest.fixture(scope="session")
def witnessed(shared: Service, text_ids: list[int]) -> dict[str, Any]:
    """What the witness says before anybody disturbs it."""
    return witness(shared, text_ids)


@pytest.fixture(scope="module")
def undisturbed(shared: Service, text_ids: list[int], witnessed: dict[str, Any]) -> Iterator[Service]:
    """The shared service; when the file's tests are over its workers are the same processes, they are idle, and the
    witness says what it said."""
    yield shared
    shared.until_idle()
    assert {row["id"]: row["pid"] for row in shared.workers()} == shared.children, "a worker died"
    assert witness(shared, text_ids) == witnessed
