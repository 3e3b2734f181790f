"""What a chat or text completion request may say, field by field. Pure.

Three answers to a field: taken, neutral (`openai/neutral_fields`: known, asks for nothing), or refused. A wrong type or
range is a 400 that names the field; an unknown field, or a value whose effect we do not have, is a 422. Null
means absent for every field that we know; a name that we do not know is more likely a slip of the pen, and is
refused whatever its value. Types are strict: "1" is no number, true is no integer, 1.0 is no integer.

What depends on the model (token ids inside the vocabulary, room in the context) is checked in
`request_builder`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from common.config import MAX_PRIORITY
from common.request import Grammar
from coordinator.openai import neutral_fields
from coordinator.openai.fields import (
    UNSUPPORTED,
    Fields,
    Label,
    MaybeLabel,
    TokenId,
    first_fault,
    problem,
    refusal,
    whole_text,
)
from coordinator.openai.formats import (
    Choices,
    Lark,
    Pattern,
    ResponseFormat,
    SchemaOrText,
    StructuredOutputs,
    grammar_of,
)
from coordinator.openai.messages import Chat, ChatMessage, check_continuation
from coordinator.openai.tools import TemplateKwargs, ToolChoice, Tools, fault_of_choice

MAX_MESSAGES = 4096
MAX_PROMPT_IDS = 1 << 19
"""Over all prompts of a request: 128 of 4,096, or one that fills a long context."""
MAX_CHOICES = 128
"""Of one request, over all its prompts."""
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MIN_REPETITION_PENALTY = 1e-9
"""Logits are divided by it; by less, they leave the range of float32."""


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise problem("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise problem(f"may hold at most {MAX_STOPS} strings, not {len(stops)}")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            raise problem(f"entry {index} must be a string that is not empty")
        if len(stop) > MAX_STOP_BYTES or len(whole_text(stop).encode()) > MAX_STOP_BYTES:
            raise problem(f"entry {index} is longer than {MAX_STOP_BYTES} bytes")
    return stops


def _prompts(value: Any) -> Any:
    """One prompt, a string or token ids, becomes a list of one; a list of prompts is of one kind."""
    if isinstance(value, str):
        return [whole_text(value)]
    if not isinstance(value, list):
        raise problem("must be a string, a list of token ids, or a list of strings or of lists of token ids")
    if not value:
        raise problem("is empty; give at least one token")
    if not isinstance(value[0], (str, list)):
        return [_prompt_ids(value, "", MAX_PROMPT_IDS)]
    if len(value) > MAX_CHOICES:
        raise problem(f"may hold at most {MAX_CHOICES} prompts, not {len(value)}")
    room = MAX_PROMPT_IDS
    for index, prompt in enumerate(value):
        if type(prompt) is not type(value[0]):
            raise problem(
                f"entry {index} is not of the first one's kind; give strings, or lists of token ids"
            )
        if isinstance(prompt, str):
            whole_text(prompt)
        else:
            room -= len(_prompt_ids(prompt, f"entry {index} " if len(value) > 1 else "", room))
    return value


def _prompt_ids(ids: list[Any], which: str, room: int) -> list[Any]:
    if not ids:
        raise problem(f"{which}is empty; give at least one token")
    if len(ids) > room:
        raise problem(f"may hold at most {MAX_PROMPT_IDS} token ids in all")
    if set(map(type, ids)) != {int}:
        raise problem(f"{which}must hold token ids only, which are whole numbers")
    return ids


_Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_BYTES)]
_StopsInput = _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)]
_PromptText = Annotated[str, StringConstraints(min_length=1)]
_PromptIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_IDS)]
_SomePrompts = Field(min_length=1, max_length=MAX_CHOICES)
_PromptsInput = Annotated[list[_PromptText], _SomePrompts] | Annotated[list[_PromptIds], _SomePrompts]


def _guided(found: tuple[Grammar, str] | None) -> tuple[Grammar, str] | None:
    return None if found is None else (found[0], f"guided_{found[1]}")


class StreamOptions(Fields):
    NEUTRAL: ClassVar[neutral_fields.Neutral] = neutral_fields.STREAM_OPTIONS

    include_usage: bool = False


class CompletionFields(Fields):
    """What chat and text completions share."""

    model: Label
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    best_of: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[list[str], BeforeValidator(_stops, json_schema_input_type=_StopsInput)] = Field(
        default_factory=list
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] = Field(
        default_factory=list
    )
    ignore_eos: bool = False
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=100)] = 1.0
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]],
        Field(
            max_length=MAX_LOGIT_BIASES,
            json_schema_extra={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}},
        ),
    ] = Field(default_factory=dict)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: MaybeLabel = ""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    service_tier: Label | None = None
    cache_salt: MaybeLabel = ""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Lark | None = None

    @model_validator(mode="after")
    def _one_grammar(self) -> CompletionFields:
        asked = self._forms
        if len(asked) > 1:
            field = asked[1][1].partition(".")[0]
            why = f"asks for a form of the answer, and {asked[0][1].partition('.')[0]} does too; give one of them"
            raise PydanticCustomError("bad_value", "{why}", {"field": field, "why": why})
        if asked and self.ignore_eos:
            why = "cannot go with a form of the answer, which says where the answer ends"
            raise PydanticCustomError("bad_value", "{why}", {"field": "ignore_eos", "why": why})
        return self

    @cached_property
    def _forms(self) -> list[tuple[Grammar, str]]:
        found = [
            self.response_format.grammar() if self.response_format is not None else None,
            self.structured_outputs.as_grammar() if self.structured_outputs is not None else None,
            _guided(grammar_of(self.guided_json, None, None, None)),
            _guided(grammar_of(None, self.guided_regex, None, None)),
            _guided(grammar_of(None, None, self.guided_choice, None)),
            _guided(grammar_of(None, None, None, self.guided_grammar)),
        ]
        return [one for one in found if one is not None]

    @property
    def form(self) -> tuple[Grammar, str] | None:
        """What the answer must look like, and the field that says so."""
        return next(iter(self._forms), None)

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> CompletionFields:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "bad_value", "{why}", {"field": "stream_options", "why": "needs stream to be true"}
            )
        return self

    @model_validator(mode="after")
    def _best_of_asks_for_nothing(self) -> CompletionFields:
        best_of = self.n if self.best_of is None else self.best_of
        if best_of < self.n:
            why = f"is less than n, which is {self.n}; leave it out"
            raise PydanticCustomError("bad_value", "{why}", {"field": "best_of", "why": why})
        if best_of > self.n:
            why = "asks for choices to be thrown away, which this server does not do"
            raise refusal(UNSUPPORTED, "best_of", f"{why}; leave it out or set it to {self.n}")
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
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)

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

    @model_validator(mode="after")
    def _template_can_be_filled(self) -> ChatFields:
        fault = fault_of_choice(self.tools, self.tool_choice)
        if fault is not None:
            raise PydanticCustomError("bad_value", "{why}", {"field": "tool_choice", "why": fault})
        check_continuation(self.messages, self.add_generation_prompt, self.continue_final_message)
        return self

    def chat(self) -> Chat:
        """What the template is filled with. Tools that may not be called are not told of."""
        offered = () if self.tool_choice == "none" else self.tools
        return Chat(
            messages=[message.for_template() for message in self.messages],
            tools=[tool.for_template() for tool in offered],
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=self.continue_final_message,
            kwargs=self.chat_template_kwargs,
        )

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TextFields(CompletionFields):
    NEUTRAL: ClassVar[neutral_fields.Neutral] = neutral_fields.TEXT

    prompt: Annotated[
        list[str] | list[list[int]],
        # Plain: pydantic would go through a million ids twice more.
        PlainValidator(_prompts, json_schema_input_type=_PromptText | _PromptIds | _PromptsInput),
    ]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _nothing_is_no_answer(self) -> TextFields:
        if self.max_tokens == 0 and not self.echo:
            why = "is 0, which leaves nothing to answer; set it to at least 1, or echo to true"
            raise PydanticCustomError("bad_value", "{why}", {"field": "max_tokens", "why": why})
        if self.max_tokens == 0 and self.min_tokens:
            why = f"{self.min_tokens} is more than the 0 tokens that the answer may have"
            raise PydanticCustomError("bad_value", "{why}", {"field": "min_tokens", "why": why})
        return self

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
