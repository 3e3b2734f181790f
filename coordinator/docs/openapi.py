"""The OpenAPI 3.1 document of the HTTP API: what is accepted, what is answered, and when. Pure.

Bodies come from the pydantic models that read them (`openai/schema`, `openai/neutral_fields`), narrowed by what this
server serves: model names, tiers, its vocabulary, its context. Answers come from `docs/answers`, errors from the tree
in `common.errors`. Nothing but routes, examples and sentences is written here.

What a schema cannot say is said in words: lengths in bytes, rules between two fields, how a body is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from common.errors import (
    BadRequest,
    BodyTooLarge,
    DeadlinePassed,
    KvferryError,
    ModelNotFound,
    NotAdmitted,
    NoWorker,
    RequestFailed,
    Unauthorized,
    UnsupportedField,
)
from common.version import VERSION
from coordinator.deadline_header import DEADLINE_HEADER, LONGEST_MS
from coordinator.docs import answers, operator_answers
from coordinator.door.front_door import MAX_REQUEST_ID_CHARS, OPEN
from coordinator.door.json_body import MAX_DEPTH
from coordinator.drain_api import ACCEPTED, DrainFields
from coordinator.errors_http import Conflict, NotForPages, ObjectNotFound
from coordinator.openai.field_schema import TOKEN_ID
from coordinator.openai.schema import ChatFields, TextFields
from coordinator.openai.tokenize_schema import DetokenizeFields, TokenizeFields
from coordinator.role_api import NOTHING_TO_DO, RoleFields

JSON: Final = "application/json"
SSE: Final = "text/event-stream"
REF: Final = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a body may say that depends on this server. `context` is the longest prompt and answer together, None
    while no worker is there; the first of `tiers` is the default one."""

    served_models: tuple[str, ...]
    tiers: tuple[str, ...]
    vocab_size: int
    context: int | None
    max_body_bytes: int
    body_timeout_s: float
    keyed: bool


@dataclass(frozen=True, slots=True)
class Route:
    """`answer` is a model, or the media type of a text; `errors` are those beside the ones that every route has."""

    method: str
    path: str
    summary: str
    answer: type[BaseModel] | str
    many: bool = False
    status: int = 200
    other_status: int | None = None
    body: type[BaseModel] | None = None
    body_optional: bool = False
    event: type[BaseModel] | None = None
    errors: tuple[type[KvferryError], ...] = ()
    example: Mapping[str, Any] = field(default_factory=dict)


OF_BODIES_WITHOUT_MODEL: Final = (BadRequest, DeadlinePassed, BodyTooLarge, UnsupportedField)
OF_BODIES: Final = (*OF_BODIES_WITHOUT_MODEL, ModelNotFound)
OF_GENERATION: Final = (*OF_BODIES, NotAdmitted, NoWorker)
OF_TOKENIZING: Final = (*OF_BODIES, NotAdmitted)

ROUTES: Final[tuple[Route, ...]] = (
    Route(
        "post",
        "/v1/chat/completions",
        "Answers a conversation",
        answers.ChatAnswer,
        body=ChatFields,
        event=answers.ChatChunk,
        errors=OF_GENERATION,
        example={"messages": [{"role": "user", "content": "What is a ferry?"}], "max_tokens": 32},
    ),
    Route(
        "post",
        "/v1/completions",
        "Goes on with a text",
        answers.TextAnswer,
        body=TextFields,
        event=answers.TextChunk,
        errors=OF_GENERATION,
        example={"prompt": "A ferry is", "max_tokens": 32, "temperature": 0},
    ),
    Route(
        "post",
        "/tokenize",
        "The token ids of a text or a chat",
        answers.Tokenized,
        body=TokenizeFields,
        errors=OF_TOKENIZING,
        example={"prompt": "A ferry is"},
    ),
    Route(
        "post",
        "/detokenize",
        "The text of token ids",
        answers.Detokenized,
        body=DetokenizeFields,
        errors=OF_TOKENIZING,
        example={"tokens": [49, 1216]},
    ),
    Route("get", "/v1/models", "Lists the served models", operator_answers.Models),
    Route("get", "/v1/models/{name}", "One served model", operator_answers.Model, errors=(ModelNotFound,)),
    Route(
        "get", "/health", "Whether a request could be served now", operator_answers.Health, errors=(NoWorker,)
    ),
    Route("get", "/version", "Which version serves", operator_answers.Version),
    Route("get", "/metrics", "Metrics of the whole cluster as Prometheus text", "text/plain"),
    Route("get", "/admin/workers", "Lists the workers", operator_answers.WorkerRow, many=True),
    Route(
        "post",
        "/admin/workers/{worker_id}/drain",
        "Lets a worker finish what it has, and leave",
        operator_answers.WorkerRow,
        status=ACCEPTED,
        body=DrainFields,
        body_optional=True,
        errors=(*OF_BODIES_WITHOUT_MODEL, NotAdmitted, NotForPages, ObjectNotFound, Conflict),
        example={"deadline_s": 60},
    ),
    Route(
        "post",
        "/admin/workers/{worker_id}/role",
        "Drains a worker, and starts it again in the other role",
        operator_answers.WorkerRow,
        status=ACCEPTED,
        other_status=NOTHING_TO_DO,
        body=RoleFields,
        errors=(*OF_BODIES_WITHOUT_MODEL, NotAdmitted, NotForPages, ObjectNotFound, Conflict),
        example={"role": "prefill", "deadline_s": 60},
    ),
    Route(
        "get",
        "/admin/requests/{request_id}",
        "The timeline of a request, running or ended a while ago",
        operator_answers.Timeline,
        errors=(ObjectNotFound,),
    ),
    Route("get", "/openapi.json", "This document", JSON),
    Route("get", "/docs", "This document as a page", "text/html"),
)

TIMELINE_OF_ANSWER: Final = {
    "operationId": "get_admin_requests_request_id",
    "parameters": {"request_id": "$response.body#/id"},
    "description": "How the request went through the cluster.",
}

PARAMETERS: Final[Mapping[str, str]] = {
    "name": "Name of a served model.",
    "request_id": "The id of an answer.",
    "worker_id": "The id of a worker, as /admin/workers lists it.",
}

WHEN: Final[Mapping[type[KvferryError], str]] = {
    BadRequest: "A value of the wrong type or out of its range, two fields that contradict each other, a prompt that "
    "does not fit the context, or a body that is not JSON. param names the field.",
    Unauthorized: "No key, or none that is valid.",
    NotForPages: "A web page of another origin asks for what changes the cluster.",
    ModelNotFound: "No model of this name is served.",
    ObjectNotFound: "The id is unknown, was forgotten, or is that of a lost worker.",
    Conflict: "As the workers stand, it cannot be done: this one is lost or draining, or would be missed in its role.",
    DeadlinePassed: "The body did not arrive in time, or the request waited too long before its first token: longer "
    f"than {DEADLINE_HEADER} says, or than the server lets any wait.",
    BodyTooLarge: "The body has more bytes than this server takes.",
    UnsupportedField: "A field that we do not know, or a value that asks for an effect that we do not have. param "
    "names it.",
    NotAdmitted: "No room now. Retry-After says when to ask again.",
    RequestFailed: "A fault of ours; the server's log has it.",
    NoWorker: "No worker can serve now, or the server is stopping.",
}

ABOUT: Final = """An OpenAI-compatible API over separate prefill and decode workers.

Null means absent for every field that is not required. Types are strict: "1" is no number, true is no integer, and
1.0 is no integer. A field that is not listed is refused, and a field that is listed without effect takes its listed
values only: nothing is ignored. Two fields of one name in an object are refused, and so is half of a surrogate pair in
a text. Rules between two fields, and lengths that are counted in bytes, are in the descriptions.

Every answer echoes the header X-Request-Id. Every error is an ErrorAnswer. After a stream has begun, a fault ends it
with an ErrorAnswer as its last event, and without `data: [DONE]`."""


def document(facts: Facts) -> dict[str, Any]:
    bodies, said = _components()
    for name in bodies:
        _narrow(said[name], facts)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route, facts)
    components: dict[str, Any] = {
        "schemas": _with_token_range(said, facts.vocab_size - 1),
        "responses": {_name(error): _error(error) for error in WHEN},
        "headers": {"RequestId": {"description": "The request's own, if it had one.", **_TEXT}},
    }
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "kvferry", "version": VERSION, "description": ABOUT},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": components,
    }
    if facts.keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
    return made


# ---------------------------------------------------------------- schemas

_TEXT: Final[dict[str, Any]] = {"schema": {"type": "string"}}


def _components() -> tuple[list[str], dict[str, Any]]:
    """Names of the bodies' schemas, and all schemas."""
    bodies = [route.body for route in ROUTES if route.body]
    outputs = [route.answer for route in ROUTES if not isinstance(route.answer, str)]
    events = [route.event for route in ROUTES if route.event]
    used: list[type[BaseModel]] = [*bodies, *outputs, *events, answers.ErrorAnswer]
    made = models_json_schema([(cls, "validation") for cls in dict.fromkeys(used)], ref_template=REF)[1]
    return [cls.__name__ for cls in bodies], {name: _tidy(schema) for name, schema in made["$defs"].items()}


def _tidy(schema: dict[str, Any]) -> dict[str, Any]:
    """Without pydantic's titles, which repeat the names."""
    for value in schema.get("properties", {}).values():
        value.pop("title", None)
    return {key: value for key, value in schema.items() if key != "title"}


def _narrow(body: dict[str, Any], facts: Facts) -> None:
    """Where only some values can be served, they are listed."""
    properties = body["properties"]
    tiers = dict.fromkeys(("auto", "default", *facts.tiers))
    for name, values in (("model", facts.served_models), ("service_tier", tiers)):
        if name in properties:
            null = [] if name in body.get("required", ()) else [None]
            properties[name] = {
                "enum": [*values, *null],
                "description": properties[name]["description"],
            }
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if name in properties and facts.context is not None:
            properties[name]["maximum"] = facts.context - 1


def _with_token_range(schema: Any, largest: int) -> Any:
    if isinstance(schema, list):
        return [_with_token_range(item, largest) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _with_token_range(value, largest) for key, value in schema.items()}
    if made.get("format") == TOKEN_ID:
        made |= {"minimum": 0, "maximum": largest}
    return made


def _ref(cls: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": REF.format(model=cls.__name__)}


# ---------------------------------------------------------------- routes


def _operation(route: Route, facts: Facts) -> dict[str, Any]:
    common = (RequestFailed, Unauthorized) if facts.keyed and route.path not in OPEN else (RequestFailed,)
    errors = sorted({*route.errors, *common}, key=lambda error: error.status)
    made: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "parameters": _parameters(route),
        "responses": {
            str(status): _answered(route) for status in (route.status, route.other_status) if status
        }
        | {str(error.status): {"$ref": f"#/components/responses/{_name(error)}"} for error in errors},
    }
    if route.body is not None:
        made["requestBody"] = _body(route, facts)
    if facts.keyed and route.path in OPEN:
        made["security"] = []
    return made


def _operation_id(route: Route) -> str:
    return "_".join(
        [route.method, *route.path.replace(".", "/").replace("{", "").replace("}", "").split("/")[1:]]
    )


def _parameters(route: Route) -> list[dict[str, Any]]:
    in_path = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    named: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "description": PARAMETERS[name], **_TEXT}
        for name in in_path
    ]
    echoed = (
        f"Echoed in the answer and written to the log: printable ASCII, cut after {MAX_REQUEST_ID_CHARS}."
    )
    named.append({"name": "X-Request-Id", "in": "header", "description": echoed, **_TEXT})
    if route.body in (ChatFields, TextFields):
        limit = {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_MS}
        said = "Milliseconds from the request's head to the first token; what has none by then ends with 408."
        named.append({"name": DEADLINE_HEADER, "in": "header", "description": said, "schema": limit})
    return named


def _body(route: Route, facts: Facts) -> dict[str, Any]:
    assert route.body is not None
    return {
        "required": not route.body_optional,
        "description": f"JSON of at most {facts.max_body_bytes} bytes and {MAX_DEPTH} levels of nesting, sent within "
        f"{facts.body_timeout_s:g} s, whatever its Content-Type.",
        "content": {JSON: {"schema": _ref(route.body), "example": example(route, facts.served_models)}},
    }


def example(route: Route, served_models: Sequence[str]) -> dict[str, Any]:
    named = route.body is not None and "model" in route.body.model_fields
    return {"model": served_models[0], **route.example} if named else dict(route.example)


def _answered(route: Route) -> dict[str, Any]:
    if isinstance(route.answer, str):
        content: dict[str, Any] = {
            route.answer: {"schema": {"type": "object" if route.answer == JSON else "string"}}
        }
    else:
        schema = {"type": "array", "items": _ref(route.answer)} if route.many else _ref(route.answer)
        content = {JSON: {"schema": schema}}
    if route.event is not None:
        content[SSE] = {"schema": _event(route.event)}
    return {
        "description": "The answer"
        + ("; with stream, as events of the schema x-event." if route.event else "."),
        "headers": _headers({}),
        "content": content,
    }


def _event(cls: type[BaseModel]) -> dict[str, Any]:
    """One event of a stream; OpenAPI 3.1 has a schema for the whole body only, and readers take it as this."""
    chunk = {"contentMediaType": JSON, "contentSchema": _ref(cls)}
    data = {
        "type": "string",
        "anyOf": [{"const": "[DONE]"}, chunk],
        "description": "A chunk as JSON; [DONE] ends the stream.",
    }
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _headers(more: Mapping[str, Any]) -> dict[str, Any]:
    return {"X-Request-Id": {"$ref": "#/components/headers/RequestId"}, **more}


def _name(error: type[KvferryError]) -> str:
    return error.__name__


def _error(error: type[KvferryError]) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if issubclass(error, (NotAdmitted, NoWorker)):
        more["Retry-After"] = {
            "description": "Whole seconds to wait before asking again.",
            "required": True,
            "schema": {"type": "integer", "minimum": 1},
        }
    if issubclass(error, Unauthorized):
        more["WWW-Authenticate"] = {"description": "Bearer.", "required": True, **_TEXT}
    return {
        "description": WHEN[error],
        "headers": _headers(more),
        "content": {JSON: {"schema": _ref(answers.ErrorAnswer)}},
    }
