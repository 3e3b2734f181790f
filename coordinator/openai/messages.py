"""The messages of a chat, as they come and as a template takes them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from coordinator.errors_http import quoted
from coordinator.openai import neutral_fields
from coordinator.openai.field_schema import describe_body
from coordinator.openai.fields import UNKNOWN, UNSUPPORTED, Fields, Label, problem, refusal, whole_text
from coordinator.openai.tools import Calls

TEMPLATE_CHARS_PER_MESSAGE = 32
MAX_PARTS = 4096
"""Of one message."""


def _content(value: Any) -> Any:
    """Content parts become one text."""
    if not isinstance(value, list):
        if not isinstance(value, str):
            raise problem("must be a string or a list of text parts")
        return whole_text(value)
    if len(value) > MAX_PARTS:
        raise problem(f"may hold at most {MAX_PARTS} parts, not {len(value)}")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise problem(f"part {index} must be an object with a type")
        if part["type"] not in ("text", "input_text"):
            raise refusal(UNSUPPORTED, f"[{index}]", f"has type {quoted(part['type'])}; only text is served")
        extra = next((key for key in part if key not in ("type", "text")), None)
        if extra is not None:
            raise refusal(UNKNOWN, f"[{index}].{extra}", "is not a field that we know")
        if not isinstance(part.get("text"), str):
            raise problem(f"part {index} must have a text that is a string")
        texts.append(whole_text(part["text"]))
    return "\n".join(texts)


class TextPart(BaseModel):
    """How the document tells of what `_content` reads."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=describe_body)

    type: Literal["text", "input_text"]
    text: str


_Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS)]
Content = Annotated[str, BeforeValidator(_content, json_schema_input_type=str | _Parts)]
Role = Literal["system", "developer", "user", "assistant", "tool"]


_RULES: list[dict[str, Any]] = [
    {
        "if": {"properties": {"role": {"const": "tool"}}},
        "then": {"required": ["tool_call_id"], "properties": {"tool_call_id": {"type": "string"}}},
    },
    {
        "if": {"properties": {"role": {"const": "assistant"}}},
        "else": {"properties": {"tool_calls": {"maxItems": 0}}},
    },
    {
        "if": {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
        "else": {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
    },
]
"""What `ChatMessage._agree` checks, for the document."""


def _describe_message(schema: dict[str, Any], cls: type) -> None:
    describe_body(schema, cls)
    schema["allOf"] = _RULES


class ChatMessage(Fields):
    model_config = ConfigDict(json_schema_extra=_describe_message)
    NEUTRAL: ClassVar[neutral_fields.Neutral] = neutral_fields.MESSAGE

    role: Role
    content: Content | None = None
    name: Label | None = None
    tool_calls: Calls = Field(default_factory=list)
    tool_call_id: Label | None = None

    def for_template(self) -> dict[str, Any]:
        """`developer` is OpenAI's later word for `system`; templates know the older one. A message without content
        has an empty one: many templates put it together with other text unasked."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    @model_validator(mode="after")
    def _agree(self) -> ChatMessage:
        if self.role == "tool" and self.tool_call_id is None:
            raise problem("a message of role tool needs its tool_call_id")
        if self.tool_calls and self.role != "assistant":
            raise problem("only a message of role assistant can have tool_calls")
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing", "Field required", {"field": "content"})
        return self


@dataclass(frozen=True, slots=True)
class Chat:
    """What a template is filled with. Messages and tools are in OpenAI's shape, but for arguments of calls, which are
    objects where the model wrote one."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chars(self) -> int:
        """About how much text the template has to work on."""
        calls = [message["tool_calls"] for message in self.messages if "tool_calls" in message]
        texts = sum(len(message["content"]) + TEMPLATE_CHARS_PER_MESSAGE for message in self.messages)
        return texts + len(json.dumps([list(self.tools), dict(self.kwargs), calls]))


def check_continuation(
    messages: Sequence[ChatMessage], add_generation_prompt: bool | None, continue_final_message: bool
) -> None:
    """An answer either begins or goes on with what is there. Raises what pydantic tells of."""
    if not continue_final_message:
        return
    why = None
    if add_generation_prompt:
        why = "contradicts add_generation_prompt, which begins a new message; set one of them to false"
    elif not (messages[-1].content or "").strip() or messages[-1].tool_calls:
        why = "needs a last message that is plain text"
    if why is not None:
        raise PydanticCustomError("bad_value", "{why}", {"field": "continue_final_message", "why": why})
