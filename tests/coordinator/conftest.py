"""A tokenizer of the default model, and a real HTTP server over a scripted cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common.config import Tier
from coordinator.door.limits import Limits
from coordinator.http_api import create_app
from coordinator.tiers import Tiers
from coordinator.tokenizer import Tokenizer
from tests.coordinator.scripted_gateway import ScriptedGateway, Served, serving

LIMITS = Limits(max_body_bytes=1 << 20, body_timeout_s=1.0, keep_alive_s=0.25, write_timeout_s=0.6)


@pytest.fixture(scope="session")
def tokenizer(smollm2_dir: Path) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer(smollm2_dir)
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="session")
def running_server(tokenizer: Tokenizer) -> Iterator[Served]:
    gateway = ScriptedGateway()
    app = create_app(
        gateway,
        tokenizer,
        gateway.metrics,
        served_models=("smol", "alias"),
        tiers=Tiers({"default": Tier(), "fast": Tier()}),
        limits=LIMITS,
    )
    with serving(app, gateway, LIMITS) as served:
        yield served


@pytest.fixture
def served(running_server: Served) -> Served:
    running_server.gateway.reset()
    return running_server


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    # Reading the system's certificates, which plain HTTP has no use for, takes longer than most tests.
    with httpx.Client(base_url=served.url, timeout=10, verify=False) as client:
        yield client
