"""A body becomes fields: a small one at once, a large one in a thread."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from common.errors import BadRequest
from coordinator.door.http_body import LARGE_BODY_BYTES, read_fields


@pytest.mark.parametrize(("chars", "on_the_loop"), [(10, True), (LARGE_BODY_BYTES, False)])
def test_a_large_body_is_parsed_and_validated_off_the_loop(chars: int, on_the_loop: bool) -> None:
    body = {"prompt": "x" * chars}
    threads: list[bool] = []

    def read(found: object) -> object:
        threads.append(threading.current_thread() is threading.main_thread())
        return found

    assert asyncio.run(read_fields(json.dumps(body).encode(), read)) == body
    assert threads == [on_the_loop]
    with pytest.raises(BadRequest):
        asyncio.run(read_fields(b"{" * chars, read))
