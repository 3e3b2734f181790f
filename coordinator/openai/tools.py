"""The tools of a chat request, the choice among them, and what a template is told besides its messages. Pure.

`strict` asks that a call's arguments fit the schema. They do wherever a call is forced (`tool_choice` required or
named). Where the model may also answer in words, its text is not bound, and the field is taken without effect: a
client then has to check what it gets, as it does without `strict`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, FailFast, Field, StringConstraints, Tag

from coordinator.door.json_body import MAX_DEPTH, deeper_than
from coordinator.errors_http import quoted
from coordinator.openai.fields import UNSUPPORTED, Fields, Label, problem, refusal, whole_text

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 << 10
MAX_TEMPLATE_NAMES = 32
MAX_TEMPLATE_BYTES = 16 << 10
_TEMPLATE_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "raise_exception",
        "strftime_now",
    }
)
"""What a template gets from us, or what would change how it is used."""


def json_bytes(value: Any) -> int:
    """Size of a value that came as JSON. Raises what pydantic tells of where it cannot be written as JSON again."""
    try:
        return len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except UnicodeEncodeError as error:
        raise problem("holds half of a surrogate pair, which is not text") from error
    except (ValueError, RecursionError) as error:
        raise problem("holds a number that is too large, or is nested too deeply") from error


def _function_only(value: Any) -> Any:
    if isinstance(value, str) and value != "function":
        raise refusal(UNSUPPORTED, "", f"{quoted(value)} is not served; only function is")
    return value


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type", "object") != "object":
        raise problem("must describe an object: its type is not object")
    json_bytes(value)
    return value


def _tools(tools: list[ToolFields]) -> list[ToolFields]:
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise problem(f"names the function {twice!r} twice")
    if json_bytes([tool.for_template() for tool in tools]) > MAX_TOOLS_BYTES:
        raise problem(f"are longer than {MAX_TOOLS_BYTES} bytes together")
    return tools


def _choice(value: Any) -> Any:
    if not isinstance(value, (str, dict)):
        raise problem("must be none, auto, required, or an object that names a function")
    return value


def _template_kwargs(values: dict[str, Any]) -> dict[str, Any]:
    for name in values:
        if name in RESERVED_TEMPLATE_NAMES or name.endswith("_token"):
            raise problem(f"may not set {name!r}, which the template gets from the server")
        if re.fullmatch(_TEMPLATE_NAME, name) is None:
            raise problem(f"{quoted(name)} is no name that a template could use")
    if json_bytes(values) > MAX_TEMPLATE_BYTES:
        raise problem(f"may have at most {MAX_TEMPLATE_BYTES} bytes")
    return values


def arguments_for_template(text: str) -> dict[str, Any] | str:
    """The arguments of an earlier call as an object, as templates want them. Nothing at all means none. A model may
    have written what is no object (or was cut): a conversation goes on all the same, with the text as it is."""
    try:
        value = json.loads(text or "{}")
        written = isinstance(value, dict) and not deeper_than(value, MAX_DEPTH)
        return value if written and json_bytes(value) else text
    except (ValueError, RecursionError):
        return text


FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
FunctionType = Annotated[Literal["function"], BeforeValidator(_function_only)]


_OBJECT_SCHEMA = Field(json_schema_extra={"properties": {"type": {"const": "object"}}})


class FunctionFields(Fields):
    name: FunctionName
    description: Annotated[str, AfterValidator(whole_text)] = ""
    parameters: Annotated[dict[str, Any], AfterValidator(_schema), _OBJECT_SCHEMA] | None = None
    strict: bool = False


class ToolFields(Fields):
    type: FunctionType
    function: FunctionFields

    def for_template(self) -> dict[str, Any]:
        """Templates read all three without asking whether they are there."""
        function = self.function
        parameters = function.parameters
        return {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description,
                "parameters": {"type": "object", "properties": {}} if parameters is None else parameters,
            },
        }


class ChosenFunction(Fields):
    name: FunctionName


class NamedChoice(Fields):
    type: FunctionType
    function: ChosenFunction


class CalledFunction(Fields):
    name: FunctionName
    arguments: Annotated[str, AfterValidator(whole_text)] = ""


class CallFields(Fields):
    """A call that the assistant made earlier in the conversation."""

    id: Label
    type: FunctionType = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": arguments_for_template(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


def _kind_of_choice(value: Any) -> str:
    return "[mode]" if isinstance(value, str) else "[named]"


ToolMode = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Annotated[ToolMode, Tag("[mode]")] | Annotated[NamedChoice, Tag("[named]")],
    Discriminator(_kind_of_choice),
    BeforeValidator(_choice, json_schema_input_type=ToolMode | NamedChoice),
]
Tools = Annotated[list[ToolFields], FailFast(), Field(max_length=MAX_TOOLS), AfterValidator(_tools)]
Calls = Annotated[list[CallFields], FailFast(), Field(max_length=MAX_TOOLS)]
TemplateKwargs = Annotated[
    dict[str, Any],
    Field(
        max_length=MAX_TEMPLATE_NAMES, json_schema_extra={"propertyNames": {"pattern": f"^{_TEMPLATE_NAME}$"}}
    ),
    AfterValidator(_template_kwargs),
]


def fault_of_choice(tools: Sequence[ToolFields], choice: ToolMode | NamedChoice | None) -> str | None:
    """Why this choice among these tools cannot be made."""
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        return "asks for a call, but there are no tools"
    if isinstance(choice, NamedChoice) and choice.function.name not in {tool.function.name for tool in tools}:
        return "names a function that is not among the tools"
    return None
