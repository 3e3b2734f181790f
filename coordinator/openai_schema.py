"""What a chat or text completion request may say, field by field. Pure.

Three answers to a field: taken, neutral (`neutral_fields`: known, asks for nothing), or refused. A wrong type or
range is a 400 that names the field; an unknown field, or a value whose effect we do not have, is a 422. Null
means absent for every field that we know; a name that we do not know is more likely a slip of the pen, and is
refused whatever its value. Types are strict: "1" is no number, true is no integer, 1.0 is no integer.

What depends on the model (token ids inside the vocabulary, room in the context) is checked in
`request_builder`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from common.errors import BadRequest, UnsupportedField
from coordinator import neutral_fields
from coordinator.errors_http import shown
from coordinator.field_schema import TOKEN_ID, describe_body

MAX_MESSAGES = 4096
MAX_PROMPT_IDS = 1 << 20
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_LABEL_CHARS = 512
MAX_PRIORITY = 2**31 - 1
MIN_REPETITION_PENALTY = 1e-9
"""Logits are divided by it; by less, they leave the range of float32."""

_UNKNOWN: Final = "unknown_field"
_UNSUPPORTED: Final = "unsupported_value"


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
        for name, value in data.items():
            if name in cls.model_fields:
                if value is not None:
                    kept[name] = value
            elif name not in cls.NEUTRAL:
                raise _refusal(_UNKNOWN, name, "is not a field that we know")
            elif value is not None and not neutral_fields.is_neutral(value, cls.NEUTRAL[name]):
                raise _refusal(_UNSUPPORTED, name, _only(cls.NEUTRAL[name]))
        return kept


def _refusal(kind: Literal["unknown_field", "unsupported_value"], name: str, why: str) -> PydanticCustomError:
    # Braces in a message would be read as its template.
    return PydanticCustomError(kind, "{why}", {"field": shown(name), "why": why})


def _only(neutral: tuple[Any, ...]) -> str:
    values = " or ".join(str(value).lower() if isinstance(value, bool) else repr(value) for value in neutral)
    return f"asks for something that this server does not do; leave it out or set it to {values or 'null'}"


def _problem(message: str) -> PydanticCustomError:
    return PydanticCustomError("bad_value", "{why}", {"why": message})


def _whole_text(text: str) -> str:
    """JSON can write half of a surrogate pair, which is no character and has no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _problem("holds half of a surrogate pair, which is not text") from error
    return text


def _content(value: Any) -> Any:
    """Content parts become one text."""
    if not isinstance(value, list):
        if not isinstance(value, str):
            raise _problem("must be a string or a list of text parts")
        return _whole_text(value)
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _problem(f"part {index} must be an object with a type")
        if part["type"] not in ("text", "input_text"):
            raise _refusal(
                _UNSUPPORTED, f"[{index}]", f"has type {shown(part['type'])!r}; only text is served"
            )
        extra = next((key for key in part if key not in ("type", "text")), None)
        if extra is not None:
            raise _refusal(_UNKNOWN, f"[{index}].{extra}", "is not a field that we know")
        if not isinstance(part.get("text"), str):
            raise _problem(f"part {index} must have a text that is a string")
        texts.append(_whole_text(part["text"]))
    return "\n".join(texts)


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise _problem("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise _problem(f"may hold at most {MAX_STOPS} strings, not {len(stops)}")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            raise _problem(f"entry {index} must be a string that is not empty")
        if len(stop) > MAX_STOP_BYTES or len(_whole_text(stop).encode()) > MAX_STOP_BYTES:
            raise _problem(f"entry {index} is longer than {MAX_STOP_BYTES} bytes")
    return stops


def _prompt(value: Any) -> Any:
    """A string or token ids; a list of one of them is unwrapped."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise _refusal(_UNSUPPORTED, "", "holds several prompts; send one request for each")
        value = value[0]
    if isinstance(value, str):
        return _whole_text(value)
    if not isinstance(value, list):
        raise _problem("must be a string, a list of token ids, or a list with one of these")
    if not value:
        raise _problem("is empty; give at least one token")
    if len(value) > MAX_PROMPT_IDS:
        raise _problem(f"may hold at most {MAX_PROMPT_IDS} token ids, not {len(value)}")
    if not all(type(item) is int for item in value):
        raise _problem("must hold token ids only, which are whole numbers")
    return value


Label = Annotated[str, StringConstraints(min_length=1, max_length=MAX_LABEL_CHARS)]
MaybeLabel = Annotated[str, StringConstraints(max_length=MAX_LABEL_CHARS)]
"""Empty means absent, as clients write it that always send the field."""
TokenId = Annotated[int, Field(json_schema_extra={"format": TOKEN_ID})]


class TextPart(BaseModel):
    """How the document tells of what `_content` reads."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=describe_body)

    type: Literal["text", "input_text"]
    text: str


_Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_BYTES)]
_StopsInput = _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)]
_PromptText = Annotated[str, StringConstraints(min_length=1)]
_PromptIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_IDS)]
_OnePrompt = Field(min_length=1, max_length=1)
_PromptsInput = Annotated[list[_PromptText], _OnePrompt] | Annotated[list[_PromptIds], _OnePrompt]

Content = Annotated[str, BeforeValidator(_content, json_schema_input_type=str | list[TextPart])]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class ChatMessage(Fields):
    NEUTRAL: ClassVar[neutral_fields.Neutral] = neutral_fields.MESSAGE

    role: Role
    content: Content
    name: Label | None = None
    tool_call_id: Label | None = None

    def for_template(self) -> dict[str, str]:
        """`developer` is OpenAI's later word for `system`; templates know the older one."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    @model_validator(mode="after")
    def _tool_names_its_call(self) -> ChatMessage:
        if self.role == "tool" and self.tool_call_id is None:
            raise _problem("a message of role tool needs its tool_call_id")
        return self


class StreamOptions(Fields):
    NEUTRAL: ClassVar[neutral_fields.Neutral] = neutral_fields.STREAM_OPTIONS

    include_usage: bool = False


class CompletionFields(Fields):
    """What chat and text completions share."""

    model: Label
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[list[str], BeforeValidator(_stops, json_schema_input_type=_StopsInput)] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] = []
    ignore_eos: bool = False
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=100)] = 1.0
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_LOGIT_BIASES, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,10}$"}}),
    ] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: MaybeLabel = ""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    service_tier: Label | None = None
    cache_salt: MaybeLabel = ""

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> CompletionFields:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "bad_value", "{why}", {"field": "stream_options", "why": "needs stream to be true"}
            )
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatFields(CompletionFields):
    NEUTRAL: ClassVar[neutral_fields.Neutral] = neutral_fields.CHAT

    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _agree(self) -> ChatFields:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "bad_value", "{why}", {"field": "top_logprobs", "why": "needs logprobs to be true"}
            )
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            why = "differs from max_completion_tokens, which means the same; give one of them"
            raise PydanticCustomError("bad_value", "{why}", {"field": "max_tokens", "why": why})
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TextFields(CompletionFields):
    NEUTRAL: ClassVar[neutral_fields.Neutral] = neutral_fields.TEXT

    prompt: Annotated[
        str | list[int],
        BeforeValidator(_prompt, json_schema_input_type=_PromptText | _PromptIds | _PromptsInput),
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


def read_chat(body: dict[str, Any]) -> ChatFields:
    """Raises BadRequest or UnsupportedField, naming the field."""
    try:
        return ChatFields.model_validate(body)
    except ValidationError as error:
        raise first_fault(error) from error


def read_text(body: dict[str, Any]) -> TextFields:
    """Raises BadRequest or UnsupportedField, naming the field."""
    try:
        return TextFields.model_validate(body)
    except ValidationError as error:
        raise first_fault(error) from error


def first_fault(error: ValidationError) -> BadRequest:
    """The first thing wrong, without the input."""
    fault = error.errors(include_input=False, include_url=False)[0]
    place = _place(fault["loc"])
    field = fault.get("ctx", {}).get("field")
    if isinstance(field, str) and field:
        place = f"{place}.{field}" if place and not field.startswith("[") else place + field
    message = f"{place or 'The body'}: {fault['msg']}."
    if fault["type"] == _UNKNOWN:
        return UnsupportedField(message, param=place, code=_UNKNOWN)
    if fault["type"] == _UNSUPPORTED:
        return UnsupportedField(message, param=place, code=_UNSUPPORTED)
    code = "missing_field" if fault["type"] == "missing" else "invalid_value"
    return BadRequest(message, param=place or None, code=code)


def _place(loc: tuple[int | str, ...]) -> str:
    place = ""
    for step in loc:
        if isinstance(step, int):
            place += f"[{step}]"
        elif step not in ("str", "list[int]", "[key]"):  # branches of a union, the key of a map
            place += f".{shown(step)}" if place else shown(step)
    return place
