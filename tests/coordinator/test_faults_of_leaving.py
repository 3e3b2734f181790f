"""BR-016: whoever leaves is noticed through every layer that a request passes on its way in."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from coordinator.door.cors import Cors
from coordinator.door.limits import Limits
from coordinator.http_api import create_app
from coordinator.tokenizer import Tokenizer
from tests.coordinator.scripted_gateway import ScriptedGateway, serving

WORD = 260  # " the"
LAYERS: dict[str, dict[str, Any]] = {
    "none": {},
    "a key": {"api_keys": ("k",)},
    "cross-origin": {"cors": Cors(origins=("http://page",))},
    "all of them": {"api_keys": ("k",), "cors": Cors(origins=("http://page",), credentials=True)},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("layers", LAYERS)
def test_BR_016_a_client_that_leaves_is_noticed_behind_every_layer(
    layers: str, stream: bool, tokenizer: Tokenizer
) -> None:
    """An answer of two thousand tokens, asked for whole or streamed: the workers are told within a second, and /metrics
    counts it, with and without keys and headers for other origins."""
    gateway = ScriptedGateway()
    gateway.answers(*[WORD] * 2000, gap_s=0.02)
    app = create_app(gateway, tokenizer, gateway.metrics, served_models=("smol",), **LAYERS[layers])
    body = json.dumps({"model": "smol", "prompt": "hi", "max_tokens": 2000, "stream": stream}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\norigin: http://page\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with serving(app, gateway, Limits()) as served:
        connection = socket.create_connection(("127.0.0.1", served.port))
        connection.sendall(head.encode() + body)
        _until(lambda: gateway.deltas_taken > 2)
        connection.close()
        left_s = time.monotonic()
        _until(lambda: gateway.cancelled)
        assert time.monotonic() - left_s < 1.0
        taken = gateway.deltas_taken
        time.sleep(0.1)
        assert gateway.deltas_taken <= taken + 1, "nobody goes on with it"
        assert gateway.metrics.aborted.labels("decoding")._value.get() == 1


def _until(done: Any) -> None:
    limit_s = time.monotonic() + 5.0
    while not done():
        assert time.monotonic() < limit_s, "it does not come to that"
        time.sleep(0.005)
