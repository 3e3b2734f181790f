"""What a request to /tokenize or /detokenize may say, as vLLM spells it. Pure."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, FailFast, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from coordinator.openai import neutral_fields
from coordinator.openai.fields import Fields, Label, TokenId, first_fault, problem, whole_text
from coordinator.openai.messages import Chat, ChatMessage, check_continuation
from coordinator.openai.schema import MAX_MESSAGES, MAX_PROMPT_IDS
from coordinator.openai.tools import TemplateKwargs, Tools

_OF_CHATS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenizeFields(Fields):
    """A text or a chat. Without a model it is the one that is served."""

    NEUTRAL: ClassVar[neutral_fields.Neutral] = neutral_fields.TOKENIZE

    model: Label | None = None
    prompt: Annotated[str, AfterValidator(whole_text)] | None = None
    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        default_factory=list
    )
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: Tools = Field(default_factory=list)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)

    @model_validator(mode="after")
    def _a_text_or_a_chat(self) -> TokenizeFields:
        if (self.prompt is None) == (not self.messages):
            raise problem("needs either a prompt or messages")
        if self.messages:
            check_continuation(self.messages, self.add_generation_prompt, self.continue_final_message)
            return self
        extra = next((name for name in _OF_CHATS if name in self.model_fields_set), None)
        if extra is not None:
            raise PydanticCustomError(
                "bad_value", "{why}", {"field": extra, "why": "goes with messages only"}
            )
        return self

    @property
    def special_tokens(self) -> bool:
        """A chat's are written by its template."""
        return not self.messages if self.add_special_tokens is None else self.add_special_tokens

    def chat(self) -> Chat:
        return Chat(
            messages=[message.for_template() for message in self.messages],
            tools=[tool.for_template() for tool in self.tools],
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=self.continue_final_message,
            kwargs=self.chat_template_kwargs,
        )


class DetokenizeFields(Fields):
    model: Label | None = None
    tokens: Annotated[list[TokenId], FailFast(), Field(max_length=MAX_PROMPT_IDS)]


def read_tokenize(body: dict[str, Any]) -> TokenizeFields:
    """Raises BadRequest or UnsupportedField, naming the field."""
    try:
        return TokenizeFields.model_validate(body)
    except ValidationError as error:
        raise first_fault(error) from error


def read_detokenize(body: dict[str, Any]) -> DetokenizeFields:
    """Raises BadRequest or UnsupportedField, naming the field."""
    try:
        return DetokenizeFields.model_validate(body)
    except ValidationError as error:
        raise first_fault(error) from error
