"""What every model of a request body shares: nulls and neutral values drop out, the rest is judged. Pure."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from common.errors import BadRequest, UnsupportedField
from coordinator.errors_http import shown
from coordinator.openai import neutral_fields
from coordinator.openai.field_schema import TOKEN_ID, describe_body

MAX_LABEL_CHARS = 512

UNKNOWN: Final = "unknown_field"
UNSUPPORTED: Final = "unsupported_value"


class Fields(BaseModel):
    """Base: drops nulls and neutral values, refuses what is left over."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        frozen=True,
        protected_namespaces=(),
        json_schema_extra=describe_body,
    )
    NEUTRAL: ClassVar[neutral_fields.Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in data.items():
            if name in known:
                if value is not None:
                    kept[name] = value
            elif name not in cls.NEUTRAL:
                raise refusal(UNKNOWN, name, "is not a field that we know")
            elif value is not None and not neutral_fields.is_neutral(value, cls.NEUTRAL[name]):
                raise refusal(UNSUPPORTED, name, _only(cls.NEUTRAL[name]))
        return kept


def refusal(kind: Literal["unknown_field", "unsupported_value"], name: str, why: str) -> PydanticCustomError:
    # Braces in a message would be read as its template.
    return PydanticCustomError(kind, "{why}", {"field": shown(name), "why": why})


def _only(neutral: tuple[Any, ...]) -> str:
    values = " or ".join(str(value).lower() if isinstance(value, bool) else repr(value) for value in neutral)
    return f"asks for something that this server does not do; leave it out or set it to {values or 'null'}"


def problem(message: str) -> PydanticCustomError:
    return PydanticCustomError("bad_value", "{why}", {"why": message})


def whole_text(text: str) -> str:
    """JSON can write half of a surrogate pair, which is no character and has no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise problem("holds half of a surrogate pair, which is not text") from error
    return text


Label = Annotated[str, StringConstraints(min_length=1, max_length=MAX_LABEL_CHARS)]
MaybeLabel = Annotated[str, StringConstraints(max_length=MAX_LABEL_CHARS)]
"""Empty means absent, as clients write it that always send the field."""
TokenId = Annotated[int, Field(json_schema_extra={"format": TOKEN_ID})]


def first_fault(error: ValidationError) -> BadRequest:
    """The first thing wrong, without the input."""
    fault = error.errors(include_input=False, include_url=False)[0]
    place = _place(fault["loc"])
    field = fault.get("ctx", {}).get("field")
    if isinstance(field, str) and field:
        place = f"{place}.{field}" if place and not field.startswith("[") else place + field
    why = "must be an object" if fault["type"] == "model_type" else fault["msg"]
    message = f"{place or 'The body'}: {why}."
    if fault["type"] == UNKNOWN:
        return UnsupportedField(message, param=place, code=UNKNOWN)
    if fault["type"] == UNSUPPORTED:
        return UnsupportedField(message, param=place, code=UNSUPPORTED)
    code = "missing_field" if fault["type"] == "missing" else "invalid_value"
    return BadRequest(message, param=place or None, code=code)


NO_PLACES = ("str", "list[int]", "[mode]", "[named]", "[key]")
"""What pydantic has in a place beside names and numbers: branches of a union, the key of a map."""


def _place(loc: tuple[int | str, ...]) -> str:
    place = ""
    for step in loc:
        if isinstance(step, int):
            place += f"[{step}]"
        elif step not in NO_PLACES:
            place += f".{shown(step)}" if place else shown(step)
    return place
