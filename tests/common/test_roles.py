"""What a worker is called in its other role, and with which flags it comes back."""

from __future__ import annotations

import os

import pytest

from common.coming_back import flags_in_other_role
from common.config import parse_worker
from common.errors import BadConfiguration
from common.messages import Role
from common.roles import id_in_other_role, other_role


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    "worker_id",
    ["decode-1", "prefill-0", "gpu3", "decode-from-x", "prefill-from-x", "x" * 64, "prefill-from-"],
)
def test_there_and_back_is_the_same_again(worker_id: str, role: Role) -> None:
    other = id_in_other_role(worker_id, role)
    assert other != worker_id
    assert id_in_other_role(other, other_role(role)) == worker_id


def test_the_id_says_the_role_and_where_it_comes_from() -> None:
    assert id_in_other_role("decode-1", "decode") == "prefill-from-decode-1"
    assert id_in_other_role("prefill-0", "prefill") == "decode-from-prefill-0"


@pytest.mark.parametrize("flags", [[], ["--worker-id=w"], ["--worker-id", "w"], ["--worker-id=" + "w" * 64]])
def test_its_flags_are_read_again_and_do_not_grow(flags: list[str]) -> None:
    flags = ["--num-kv-blocks=7", *flags]
    first = parse_worker(flags, "decode").name_as("decode")
    assert first == parse_worker(flags, "decode").worker_id or first == f"decode-{os.getpid()}"
    there = flags_in_other_role("decode", first, flags)
    settings = parse_worker(there, "prefill")
    assert (settings.worker_id, settings.num_kv_blocks) == (f"prefill-from-{first}", 7)
    back = flags_in_other_role("prefill", settings.name_as("prefill"), there)
    assert parse_worker(back, "decode").worker_id == first
    assert len(flags_in_other_role("decode", first, back)) == len(there) == len(back)


def test_an_id_that_is_too_long_is_still_refused() -> None:
    for name in ("w" * 65, "prefill-from-" + "w" * 65):
        with pytest.raises(BadConfiguration):
            parse_worker(["--worker-id", name], "decode")
