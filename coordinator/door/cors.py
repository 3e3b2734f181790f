"""Which web pages may call the service (CORS). Off unless origins are named: then no header says anything of it.

Starlette's middleware is pure ASGI, so it hides no disconnect. It stands before the front door: a browser asks whether
it may (the preflight) without a key, and refusals must carry the headers too, or pages cannot read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware

from coordinator.door.front_door import ASGIApp

READABLE_HEADERS = ("x-request-id", "retry-after")
"""Of an answer, beside the few that every page may read."""


@dataclass(frozen=True, slots=True)
class Cors:
    origins: Sequence[str] = ()
    credentials: bool = False
    methods: Sequence[str] = ("*",)
    headers: Sequence[str] = ("*",)

    def around(self, app: ASGIApp) -> ASGIApp:
        if not self.origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=self.origins,
            allow_credentials=self.credentials,
            allow_methods=self.methods,
            allow_headers=self.headers,
            expose_headers=READABLE_HEADERS,
        )
