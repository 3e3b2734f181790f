"""The contract of a channel (`test_channels.py`) between pools on a device: what is another there is how blocks are
read, stored and hashed, so it is the same tests again, those that move bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.gpu.host_driver import build
from tests.transfer import test_channels as contract
from tests.transfer.bare_pool import ON_DEVICE


@pytest.fixture(params=["tcp", "ipc"])
def channel(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture(autouse=True)
def on_device(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ON_DEVICE, str(library))
    monkeypatch.setattr(contract, "LARGE", 16 << 10)  # the interpreter takes milliseconds for as much


test_arrive = contract.test_blocks_arrive_whole_and_in_their_places
test_spoilt = contract.test_spoilt_bytes_are_refused_and_asked_for_again_twice
test_BR_020 = contract.test_BR_020_what_is_written_after_a_block_was_sent_never_arrives
test_BR_018 = contract.test_BR_018_a_late_writer_cannot_touch_a_block
test_too_much = contract.test_a_header_that_names_too_much_brings_nothing
test_twice = contract.test_a_block_that_came_twice_in_one_message_is_filled_once
