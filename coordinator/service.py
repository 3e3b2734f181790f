"""The coordinator process: HTTP and the control plane in one event loop, from settings to exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import time
from dataclasses import replace

import uvicorn
import uvloop

from common.config import CoordinatorSettings
from common.endpoints import Endpoint, parse_endpoint
from common.logs import set_up_logging
from common.long_lived import keep_out_of_collections
from common.ordering import POLICIES
from common.request import first_attempt_of_epoch
from coordinator.cluster import Cluster
from coordinator.control_plane import FRONT, ControlPlane
from coordinator.door.cors import Cors
from coordinator.door.front_door import tenant_of
from coordinator.door.http_server import listen, make_server, within_open_files
from coordinator.door.limits import Limits
from coordinator.door.tls import server_context
from coordinator.first_token import FirstTokenPacing
from coordinator.http_api import create_app
from coordinator.metrics import Metrics
from coordinator.model_folder import local_folder
from coordinator.queue import WaitingQueue
from coordinator.registry import Registry
from coordinator.structured_output import StructuredOutput
from coordinator.targets import targets_of
from coordinator.tiers import Tiers
from coordinator.tokenizer import Tokenizer
from transfer.cluster_key import ClusterKey
from transfer.sockets import allow_open_files

log = logging.getLogger(__name__)

LAST_WORDS_S = 2.0


def run(settings: CoordinatorSettings, key: ClusterKey | None) -> int:
    """Serves until SIGTERM or Ctrl-C; 0 after a clean stop. Raises StartupError."""
    set_up_logging(settings.log_level)
    allow_open_files()
    tls = server_context(settings)
    listener = listen(settings.host, settings.port)
    template = None if settings.chat_template is None else settings.chat_template.read_text("utf-8")
    tokenizer = Tokenizer(local_folder(settings.model or ""), template)
    structured = StructuredOutput(tokenizer)
    structured.prepare()
    keep_out_of_collections()
    uvloop.run(_serve(settings, tokenizer, structured, listener, tls, key))
    return 0


async def _serve(
    settings: CoordinatorSettings,
    tokenizer: Tokenizer,
    structured: StructuredOutput,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    key: ClusterKey | None,
) -> None:
    targets = {name: targets_of(tier) for name, tier in settings.all_tiers.items()}
    metrics = Metrics(tuple(settings.all_tiers), targets)
    limits = within_open_files(_limits(settings))
    registry = Registry(
        tokenizer_hash=tokenizer.tokenizer_hash,
        vocab_size=tokenizer.vocab_size,
        fronts={},
        heartbeat_interval_s=settings.heartbeat_interval,
        lost_after_s=settings.worker_timeout,
        hung_after_s=settings.progress_timeout,
    )
    tiers = settings.all_tiers
    queue = WaitingQueue(
        max_requests=settings.max_queue,
        max_tokens=settings.max_waiting_tokens,
        policy=POLICIES[settings.scheduling_policy],
        tier_limits={name: tier.max_queue for name, tier in tiers.items() if tier.max_queue is not None},
    )
    cluster = Cluster(
        registry,
        queue,
        first_attempt=first_attempt_of_epoch(int(time.time())),
        max_wait_s=settings.queue_timeout,
        unheld_after_s=5 * settings.heartbeat_interval,
        targets=targets,
        local_prefill=settings.local_prefill == "auto",
        refuse_late=settings.admission == "forecast",
    )
    plane = ControlPlane(
        cluster,
        metrics,
        collocated=settings.collocated,
        request_timeout_s=settings.request_timeout,
        max_buffered_bytes=settings.max_buffered_bytes,
        key=key,
    )
    control = parse_endpoint(settings.control)
    control_at = plane.start(control)
    tokens_at = plane.bind_tokens(replace(control, port=settings.tokens_port))
    registry.set_front(FRONT, tokens_at)
    app = create_app(
        plane,
        tokenizer,
        metrics,
        served_models=(settings.model_name,),
        tiers=Tiers(
            tiers,
            {tenant_of(key): name for name, tier in tiers.items() for key in tier.api_key_file},
            one_tenant=settings.one_tenant,
        ),
        pacing=FirstTokenPacing(targets),
        seed=settings.seed,
        api_keys=settings.api_keys,
        front=FRONT,
        limits=limits,
        cors=_cors(settings),
        structured=structured,
        tool_call_parser=settings.tool_call_parser,
    )
    server = make_server(app, limits, lambda reason: metrics.connections_closed.labels(reason).inc(), tls)
    setattr(server, "capture_signals", contextlib.nullcontext)  # noqa: B010 - signals are ours, below
    http_at = Endpoint(settings.host.strip("[]"), listener.getsockname()[1]).address
    scheme = "http" if tls is None else "https"
    log.info("serves %s://%s; workers come to %s, their tokens to %s", scheme, http_at, control_at, tokens_at)
    await _until_stopped(server, plane, listener, settings.shutdown_timeout)


def _limits(settings: CoordinatorSettings) -> Limits:
    return Limits(
        max_body_bytes=settings.max_body_size,
        max_buffered_bytes=settings.max_buffered_bytes,
        max_concurrent_requests=settings.max_concurrent_requests,
        max_connections=settings.max_connections,
        head_timeout_s=settings.head_timeout,
        body_timeout_s=settings.body_timeout,
        write_timeout_s=settings.write_timeout,
    )


def _cors(settings: CoordinatorSettings) -> Cors:
    return Cors(
        settings.allowed_origins,
        settings.allow_credentials,
        settings.allowed_methods,
        settings.allowed_headers,
    )


async def _until_stopped(
    server: uvicorn.Server, plane: ControlPlane, listener: socket.socket, shutdown_timeout_s: float
) -> None:
    """First signal drains: 503 for what comes, time for what runs. A second one ends what runs with an error."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    asked = asyncio.create_task(signals.get())
    await asyncio.wait({serving, asked}, return_when=asyncio.FIRST_COMPLETED)
    again = asyncio.create_task(signals.get())
    draining = asyncio.create_task(plane.drain(shutdown_timeout_s))
    await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    for task in (draining, asked, again):
        task.cancel()
    plane.end_all()
    # Answers and errors that are complete get a moment to leave; idle keep-alive connections do not hold us up.
    await asyncio.wait({serving}, timeout=LAST_WORDS_S)
    server.force_exit = True
    serving.cancel()
    await plane.close()
