"""Text to ask about, in pieces that share no beginning."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

LICENSE = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="session")
def text_ids(smollm2_dir: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    return list(tokenizer.encode(LICENSE.read_text(), add_special_tokens=False).ids)
