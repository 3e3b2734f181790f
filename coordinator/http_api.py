"""The HTTP routes of the contract over a Gateway, as one ASGI app.

The two completion routes are `Generation`; all others answer at once from what the gateway knows.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from common.errors import KvferryError, NoWorker
from common.request import FrontId
from common.version import VERSION
from coordinator.docs.openapi import Facts
from coordinator.docs.routes import add_docs_routes
from coordinator.door.cors import Cors
from coordinator.door.front_door import ARRIVAL, ASGIApp, FrontDoor
from coordinator.door.http_body import Receive, Scope, Send
from coordinator.door.limits import Limits
from coordinator.drain_api import add_drain_route
from coordinator.errors_http import (
    MethodNotAllowed,
    ObjectNotFound,
    RouteNotFound,
    error_headers,
    error_object,
    internal_error,
    model_not_found,
    quoted,
    shown,
)
from coordinator.first_token import FirstTokenPacing
from coordinator.gateway import Gateway
from coordinator.generation import CHAT, TEXT, Generation, Kitchen
from coordinator.metrics import Metrics
from coordinator.request_builder import RequestBuilder
from coordinator.role_api import add_role_route
from coordinator.structured_output import StructuredOutput
from coordinator.tiers import Tiers
from coordinator.tokenize_api import TokenizeApi, add_tokenize_routes
from coordinator.tokenizer import Tokenizer
from coordinator.tools.families import family_of
from coordinator.tracker import RECENT_LIMIT

log = logging.getLogger("kvferry.http")

DEFAULT_FRONT = FrontId("front-0")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(
    gateway: Gateway,
    tokenizer: Tokenizer,
    metrics: Metrics,
    *,
    served_models: Sequence[str],
    tiers: Tiers | None = None,
    pacing: FirstTokenPacing | None = None,
    seed: int | None = None,
    api_keys: Sequence[str] = (),
    front: FrontId = DEFAULT_FRONT,
    limits: Limits | None = None,
    structured: StructuredOutput | None = None,
    tool_call_parser: str = "auto",
    cors: Cors | None = None,
) -> ASGIApp:
    """Without `api_keys` every route is open, with them `/health` alone. `seed`: see `RequestBuilder`."""
    family = family_of(tokenizer.template, tokenizer.added_ids, tool_call_parser)
    has_place = tokenizer.template is not None and tokenizer.template.has_place_for_tools
    told = "by the chat template" if has_place else "as text, for want of a place in the chat template"
    log.info("tools are told %s; their calls are read as those of the %s family", told, family.name)
    tiers = tiers or Tiers(one_tenant=len(api_keys) <= 1)
    builder = RequestBuilder(gateway, tokenizer, tuple(served_models), tiers, front, seed, structured, family)
    limits = limits or Limits()
    kitchen = Kitchen(gateway, tokenizer, builder, metrics, limits, pacing or FirstTokenPacing({}))
    app = _App(kitchen)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(KvferryError, _kvferry_error)
    app.add_exception_handler(Exception, _unforeseen)
    _add_completion_routes(app)
    _add_model_routes(app, gateway, tuple(served_models))
    add_tokenize_routes(app, TokenizeApi(gateway, tokenizer, tuple(served_models)), kitchen.limits)
    _add_operator_routes(app, gateway)
    add_drain_route(app, gateway, limits)
    add_role_route(app, gateway, limits)
    add_docs_routes(app, _facts(kitchen, tuple(served_models), tiers.names, bool(api_keys)))
    _answer_heads(app)
    cors = cors or Cors()
    door = FrontDoor(
        app,
        api_keys,
        limits.max_concurrent_requests,
        lambda code: metrics.rejected.labels(code).inc(),
        cors.origins,
    )
    return cors.around(door)


def _facts(
    kitchen: Kitchen, served_models: tuple[str, ...], tiers: tuple[str, ...], keyed: bool
) -> Callable[[], Facts]:
    """What the document of this server is made from: of now, because workers come and go."""
    return lambda: Facts(
        served_models=served_models,
        tiers=tiers,
        vocab_size=kitchen.tokenizer.vocab_size,
        context=kitchen.gateway.max_model_len(),
        max_body_bytes=kitchen.limits.max_body_bytes,
        body_timeout_s=kitchen.limits.body_timeout_s,
        keyed=keyed,
    )


_COMPLETIONS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}


class _App(FastAPI):
    """Completions go straight to `Generation`, which reads, watches and writes the connection itself: FastAPI's layers
    would stand in the way of every token that is sent, and took a third of what a request costs the front."""

    def __init__(self, kitchen: Kitchen) -> None:
        # FastAPI's own document is made from its routes, which know nothing of bodies and answers.
        super().__init__(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        self._kitchen = kitchen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        surface = _COMPLETIONS.get(scope["path"]) if scope["type"] == "http" else None
        if surface is not None and scope["method"] == "POST":
            await Generation(self._kitchen, surface, scope[ARRIVAL])(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def _add_completion_routes(app: _App) -> None:
    """For what is no POST to them: it is told which method is right."""

    async def answered_above() -> None:
        raise AssertionError

    for path in _COMPLETIONS:
        app.post(path)(answered_above)


def _add_model_routes(app: FastAPI, gateway: Gateway, served_models: tuple[str, ...]) -> None:
    created_s = int(time.time())

    def entry(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "kvferry",
            "max_model_len": gateway.max_model_len(),
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [entry(name) for name in served_models]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in served_models:
            raise model_not_found(name, served_models)
        return _json(entry(name))


def _add_operator_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health")
    async def health() -> Response:
        reason = gateway.health()
        if reason is not None:
            raise NoWorker(reason, code="not_ready")
        return _json({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics_text(), media_type=METRICS_TYPE)

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": VERSION})

    @app.get("/admin/workers")
    async def workers() -> Response:
        return _json(gateway.workers())

    @app.get("/admin/requests/{request_id}")
    async def timeline(request_id: str) -> Response:
        found = gateway.timeline(request_id)
        if found is None:
            raise ObjectNotFound(
                f"No request {quoted(request_id)} is known here, or it was forgotten: "
                f"the {RECENT_LIMIT} that ended last are kept.",
                code="request_not_found",
            )
        return _json(found)


def _answer_heads(app: FastAPI) -> None:
    """Load balancers probe with HEAD. What answers GET does; the server under the app leaves the body out."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")


def _json(value: Any) -> Response:
    return Response(json.dumps(value), media_type="application/json")


async def _kvferry_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, KvferryError)
    body = error_object(error)
    headers = {name.decode(): value.decode() for name, value in error_headers(error, body)}
    return Response(body, error.status, headers)


async def _unforeseen(request: Request, _: Exception) -> Response:
    """Starlette raises it again after this answer, and `FrontDoor` logs it."""
    return await _kvferry_error(request, internal_error())


async def _http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not by this method."""
    assert isinstance(error, HTTPException)
    path = shown(request.url.path)
    if error.status_code == 405:
        response = await _kvferry_error(
            request,
            MethodNotAllowed(f"{path} does not take {shown(request.method)}.", code="method_not_allowed"),
        )
        response.headers.update(error.headers or {})
        return response
    return await _kvferry_error(
        request, RouteNotFound(f"There is nothing at {path}.", code="route_not_found")
    )
