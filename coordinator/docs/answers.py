"""What each route answers, as the document declares it. Pure.

Answers are written by `openapi_shapes` and `tokenize_api`, straight to JSON; nothing is built from these
classes. `tests/coordinator/test_openapi.py` holds real answers against them: a key that is not here, or is missing
there, fails. A field without a default is always there; one with a default may be left out.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class Answer(BaseModel):
    """Closed: nothing else is in it."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)


# ---------------------------------------------------------------- what both kinds of completion have


class PromptTokensDetails(Answer):
    """Of the prompt's tokens."""

    cached_tokens: Count
    """Tokens whose KV was found in a prefix cache before the request computed anything."""


class Usage(Answer):
    """Counts of tokens."""

    prompt_tokens: Count
    """Tokens of the prompts, the template's included; each prompt counts once, however many answers it gets."""
    completion_tokens: Count
    """Tokens of all answers, those that ended them included."""
    total_tokens: Count
    """Both together."""
    prompt_tokens_details: PromptTokensDetails


Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]
Index = Annotated[int, Field(ge=0)]


class Completion(Answer):
    """What an answer and a chunk of a stream begin with."""

    id: str
    """Our id of the request, the one that /admin/requests/{request_id} takes."""
    created: Count
    """When the answer began, in seconds since 1970."""
    model: str
    """The model as the request named it."""
    service_tier: str
    """The tier that served it: the one it named, or its key's, or default."""
    system_fingerprint: Annotated[str, Field(pattern="^fp_[0-9a-f]{10}$")]
    """The same as long as everything is that decides the answers' bits: model, dtype, versions."""


# ---------------------------------------------------------------- chat


class TokenEntry(Answer):
    """A token and its log-probability."""

    token: str
    """Its text; bytes that are no whole character as \\xNN."""
    logprob: float
    """Natural logarithm of its probability; -9999 for none."""
    bytes: list[Annotated[int, Field(ge=0, le=255)]]
    """Its bytes in UTF-8."""


class ScoredEntry(TokenEntry):
    """A token of the answer."""

    top_logprobs: list[TokenEntry]
    """The most likely tokens in its place, as many as were asked for."""


class ChatLogprobs(Answer):
    """Log-probabilities of the answer's tokens."""

    content: list[ScoredEntry]
    """One for each token with text."""
    refusal: None
    """Always null."""


class CalledFunction(Answer):
    """A function and what it is to be called with."""

    name: str
    """Name of a function that was offered."""
    arguments: str
    """JSON as the model wrote it, which fits the function's schema where the call was forced and not cut."""


class ToolCall(Answer):
    """A call that the model makes."""

    id: str
    """For the message of role tool that answers it."""
    type: Literal["function"]
    """Always function."""
    function: CalledFunction


class AssistantMessage(Answer):
    """What the model says."""

    role: Literal["assistant"]
    """Always assistant."""
    content: str | None
    """The text of the answer; null where there is none but calls."""
    refusal: None
    """Always null."""
    tool_calls: list[ToolCall] = []
    """Calls, if there are any."""


class ChatChoice(Answer):
    """One answer."""

    index: Index
    """Its place among the choices."""
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    """Null where none were asked for; else every token of the answer, those of calls among them."""
    finish_reason: ChatFinish
    """stop: it ended by itself or at a stop; length: max_tokens were reached; tool_calls: it ended by itself and has
    calls that were not asked for by name."""


class ChatAnswer(Completion):
    """A whole answer to a chat."""

    object: Literal["chat.completion"]
    """What this is."""
    choices: list[ChatChoice]
    """The answers."""
    usage: Usage


class FunctionDelta(Answer):
    """A function's name, or more of its arguments."""

    name: str = ""
    """In the first delta of a call."""
    arguments: str
    """Text that follows on the deltas before, empty in the first."""


class ToolCallDelta(Answer):
    """What is new in one call."""

    index: Index
    """Which call of this answer."""
    id: str = ""
    """In the first delta of a call."""
    type: Literal["function"] = "function"
    """In the first delta of a call."""
    function: FunctionDelta


class ChatDelta(Answer):
    """What is new in the message; empty in the last chunk."""

    role: Literal["assistant"] = "assistant"
    """In the first chunk only."""
    content: str = ""
    """Text that follows on the chunks before."""
    tool_calls: list[ToolCallDelta] = []
    """A call that begins, or more of the arguments of the last one."""


class ChatChunkChoice(Answer):
    """What is new in one answer."""

    index: Index
    """Which answer."""
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    """Of the tokens whose text this chunk completes; null where none were asked for."""
    finish_reason: ChatFinish | None
    """Null but in the last chunk."""


class ChatChunk(Completion):
    """One event of a streamed answer to a chat."""

    object: Literal["chat.completion.chunk"]
    """What this is."""
    choices: list[ChatChunkChoice]
    """One; none in the event that has the usage."""
    usage: Usage | None = None
    """Only where stream_options asked for it: null, and the counts in one event after the last chunk."""


# ---------------------------------------------------------------- text


class TextLogprobs(Answer):
    """Log-probabilities of the tokens; lists of one length, an entry for each token with text."""

    tokens: list[str]
    """Their texts; bytes that are no whole character as bytes:\\xNN."""
    token_logprobs: list[float | None]
    """Natural logarithms of their probabilities; null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens in each one's place, and the token itself; null as above."""
    text_offset: list[Count]
    """Where in the text each begins, in characters."""


class TextChoice(Answer):
    """One answer."""

    index: Index
    """Its place among the choices."""
    text: str
    """The text of the answer; with echo, the prompt's before it."""
    logprobs: TextLogprobs | None
    """Null where none were asked for."""
    finish_reason: Finish
    """stop: it ended by itself or at a stop; length: max_tokens were reached."""


class TextAnswer(Completion):
    """A whole answer to a text."""

    object: Literal["text_completion"]
    """What this is."""
    choices: list[TextChoice]
    """The answers."""
    usage: Usage


class TextChunkChoice(TextChoice):
    """What is new in one answer."""

    finish_reason: Finish | None  # type: ignore[assignment]
    """Null but in the last chunk."""


class TextChunk(Completion):
    """One event of a streamed answer to a text."""

    object: Literal["text_completion"]
    """What this is."""
    choices: list[TextChunkChoice]
    """One; none in the event that has the usage."""
    usage: Usage | None = None
    """Only where stream_options asked for it: null, and the counts in one event after the last chunk."""


# ---------------------------------------------------------------- errors


class ErrorDetail(Answer):
    """What is wrong, in OpenAI's shape."""

    message: str
    """What is wrong and what to do, for a person; at most 1,001 characters, and never what was sent."""
    type: str
    """The kind of error."""
    param: str | None
    """The field that is wrong, as a path: messages[0].content. Null where it is no field."""
    code: str
    """The error in one word, for a program."""


class ErrorAnswer(Answer):
    """Every answer with a status of 400 and more, and the last event of a stream that failed."""

    error: ErrorDetail


# ---------------------------------------------------------------- token ids


class Tokenized(Answer):
    """What a text or a chat is to the model."""

    count: Count
    """How many tokens."""
    max_model_len: Count | None
    """The context; null while no worker is there."""
    tokens: list[int]
    """Their ids."""
    token_strs: list[str] | None
    """As the vocabulary spells them; null unless asked for."""


class Detokenized(Answer):
    """The text of token ids."""

    prompt: str
    """The text, special tokens by their names; what is no UTF-8 is replaced."""
