"""`/openapi.json` and `/docs`: the document of this server and its page.

With API keys set both need one: they tell which models and tiers are served. Made anew only when a fact changed, which
is when workers come or go.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from fastapi import FastAPI
from starlette.responses import Response

from coordinator.docs.openapi import Facts, document
from coordinator.docs.page import page

NOTHING_FROM_ELSEWHERE = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


class Documents:
    """The bytes of both, for the facts of now."""

    def __init__(self, facts: Callable[[], Facts]) -> None:
        self._facts = facts
        self._made_for: Facts | None = None
        self._json = b""
        self._html = b""

    def json(self) -> bytes:
        self._refresh()
        return self._json

    def html(self) -> bytes:
        self._refresh()
        return self._html

    def _refresh(self) -> None:
        facts = self._facts()
        if facts != self._made_for:
            made = document(facts)
            self._json, self._html = json.dumps(made).encode(), page(made).encode()
            self._made_for = facts


def add_docs_routes(app: FastAPI, facts: Callable[[], Facts]) -> None:
    documents = Documents(facts)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(documents.json(), media_type="application/json")

    @app.get("/docs")
    async def docs() -> Response:
        return Response(documents.html(), media_type="text/html", headers=NOTHING_FROM_ELSEWHERE)
