"""The messages of a chat, as they come and as a template takes them. Pure."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from coordinator import neutral_fields
from coordinator.errors_http import shown
from coordinator.field_schema import describe_body
from coordinator.openai_fields import UNKNOWN, UNSUPPORTED, Fields, Label, problem, refusal, whole_text


def _content(value: Any) -> Any:
    """Content parts become one text."""
    if not isinstance(value, list):
        if not isinstance(value, str):
            raise problem("must be a string or a list of text parts")
        return whole_text(value)
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise problem(f"part {index} must be an object with a type")
        if part["type"] not in ("text", "input_text"):
            raise refusal(UNSUPPORTED, f"[{index}]", f"has type {shown(part['type'])!r}; only text is served")
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
            raise problem("a message of role tool needs its tool_call_id")
        return self
