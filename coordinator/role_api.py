"""`POST /admin/workers/{worker_id}/role`: a worker is drained, and comes back in the other role.

Answers with its row: 202 while it is on its way, 200 where it has that role already, 409 where it cannot be done now.
"""

from __future__ import annotations

import json
from typing import Any, Final

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.responses import Response

from common.messages import Role
from coordinator.door.json_answer import JsonAnswer
from coordinator.door.limits import Limits
from coordinator.drain_api import ACCEPTED, DrainFields, no_such_worker
from coordinator.gateway import Gateway
from coordinator.openai.fields import first_fault

NOTHING_TO_DO: Final = 200


class RoleFields(DrainFields):
    role: Role


def read_role(body: dict[str, Any]) -> RoleFields:
    """Raises BadRequest or UnsupportedField, naming the field."""
    try:
        return RoleFields.model_validate(body)
    except ValidationError as error:
        raise first_fault(error) from error


def add_role_route(app: FastAPI, gateway: Gateway, limits: Limits) -> None:
    @app.post("/admin/workers/{worker_id}/role")
    async def set_role(worker_id: str) -> Response:
        async def work(fields: RoleFields) -> tuple[int, bytes]:
            row = gateway.set_role(worker_id, fields.role, fields.deadline_s)
            if row is None:
                raise no_such_worker(worker_id)
            return NOTHING_TO_DO if row["becomes"] is None else ACCEPTED, json.dumps(row).encode()

        return JsonAnswer(read_role, work, limits)
