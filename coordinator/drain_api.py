"""`POST /admin/workers/{worker_id}/drain`: a worker gets nothing new, ends what it has, and leaves.

Answers with its row; 409 where it is lost. The last worker of its role may be drained too: `/health` says what then is
missing.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

from fastapi import FastAPI
from pydantic import Field, ValidationError
from starlette.responses import Response

from coordinator.door.json_answer import JsonAnswer
from coordinator.door.limits import Limits
from coordinator.errors_http import ObjectNotFound, quoted
from coordinator.gateway import Gateway
from coordinator.openai.fields import Fields, first_fault

ACCEPTED: Final = 202
LONGEST_S: Final = 3600.0


class DrainFields(Fields):
    deadline_s: Annotated[float, Field(ge=0, le=LONGEST_S)] = 30.0


def read_drain(body: dict[str, Any]) -> DrainFields:
    """Raises BadRequest or UnsupportedField, naming the field."""
    try:
        return DrainFields.model_validate(body)
    except ValidationError as error:
        raise first_fault(error) from error


def no_such_worker(worker_id: str) -> ObjectNotFound:
    return ObjectNotFound(f"No worker {quoted(worker_id)} is here.", code="worker_not_found")


def add_drain_route(app: FastAPI, gateway: Gateway, limits: Limits) -> None:
    @app.post("/admin/workers/{worker_id}/drain")
    async def drain(worker_id: str) -> Response:
        async def work(fields: DrainFields) -> bytes:
            row = gateway.drain_worker(worker_id, fields.deadline_s)
            if row is None:
                raise no_such_worker(worker_id)
            return json.dumps(row).encode()

        return JsonAnswer(read_drain, work, limits, status=ACCEPTED, optional=True)
