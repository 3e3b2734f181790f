"""What an answer must look like, in OpenAI's words (`response_format`) and vLLM's. Pure.

All come down to one `Grammar`. JSON is written with ", " and ": " between its parts and no other white space: white
space without end would let an answer go on for ever. `strict` changes nothing, an answer is always held to all of
its schema. Lark is the grammar language of llguidance.
"""

from __future__ import annotations

import json
import re
import string
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from common.errors import BadRequest
from common.request import Grammar
from coordinator.door.json_body import parse_object
from coordinator.openai import neutral_fields, schema_keywords
from coordinator.openai.fields import UNSUPPORTED, Fields, problem, refusal, whole_text

MAX_GRAMMAR_CHARS = 64 << 10
"""Looked at before anything else is done with a form: a body may be a hundred times as long."""
MAX_CHOICES = 4096
JSON_SPACING: Final = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""Said to the grammar library inside the schema, so that the text alone is the whole grammar."""


def _schema(value: Any) -> Any:
    """A schema as an object or, as vLLM takes it too, as the text of one."""
    if isinstance(value, str):
        _check_length(value)
        try:
            value = parse_object(whole_text(value).encode())
        except BadRequest as error:
            raise problem("must be a JSON schema, as an object or as its text") from error
    if not isinstance(value, dict):
        raise problem("must be a JSON schema, which is an object")
    _check_length(_written(value))
    fault = schema_keywords.first_fault(value)
    if fault is not None:
        raise problem(fault)
    return value


def _check_length(text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise problem(f"is longer than {MAX_GRAMMAR_CHARS} bytes")


def _choices(values: list[str]) -> list[str]:
    if sum(map(len, values)) > MAX_GRAMMAR_CHARS:
        raise problem(f"is longer than {MAX_GRAMMAR_CHARS} bytes, all strings together")
    return values


def _lark(value: Any) -> Any:
    """What the library's Lark has and answers are not held to here: directives would bring in schemas and settings past
    the checks, a token by its id could be one that ends an answer, and attributes can say how to sample."""
    if not isinstance(value, str):
        return value
    rest = _LARK_TEXTS.sub(" ", value)
    sign = _LARK_NOT_TAKEN.search(rest)
    if sign is not None:
        raise problem(f"{sign[0]} is not taken here, other than inside a string")
    for found in _LARK_ATTRIBUTES.finditer(rest):
        names = {part.partition("=")[0].strip() for part in found[1].split(",")}
        if not names <= _LARK_ATTRIBUTES_TAKEN:
            raise problem("takes no attributes of rules but lazy, stop and suffix")
    return value


def _format_kind(value: Any) -> Any:
    if value == "structural_tag":
        raise refusal(UNSUPPORTED, "", "asks for something that this server does not do")
    return value


Schema = Annotated[dict[str, Any], BeforeValidator(_schema, json_schema_input_type=dict[str, Any])]
SchemaOrText = Annotated[
    dict[str, Any], BeforeValidator(_schema, json_schema_input_type=dict[str, Any] | str)
]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Lark = Annotated[Pattern, BeforeValidator(_lark, json_schema_input_type=Pattern)]
Choices = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARS)]],
    Field(min_length=1, max_length=MAX_CHOICES),
    AfterValidator(_choices),
]


class JsonSchemaFormat(Fields):
    name: Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Schema = Field(alias="schema")
    description: str = ""
    strict: bool = False


class ResponseFormat(Fields):
    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        BeforeValidator(_format_kind, json_schema_input_type=Literal["text", "json_object", "json_schema"]),
    ]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_goes_with_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise problem("json_schema is there for type json_schema, and for that alone")
        return self

    def grammar(self) -> tuple[Grammar, str] | None:
        """With the name of the field that asks for it."""
        if self.json_schema is not None:
            return grammar_of_schema(self.json_schema.schema_), "response_format.json_schema.schema"
        return (ANY_OBJECT, "response_format") if self.type == "json_object" else None


class StructuredOutputs(Fields):
    NEUTRAL: ClassVar[neutral_fields.Neutral] = neutral_fields.STRUCTURED_OUTPUTS

    json_: SchemaOrText | None = Field(default=None, alias="json")
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Lark | None = None
    json_object: bool = False

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(value is not None for value in given) != 1:
            raise problem("takes exactly one of json, regex, choice, grammar and json_object")
        return self

    def as_grammar(self) -> tuple[Grammar, str]:
        if self.json_object:
            return ANY_OBJECT, "structured_outputs.json_object"
        found = grammar_of(self.json_, self.regex, self.choice, self.grammar)
        assert found is not None
        return found[0], f"structured_outputs.{found[1]}"


def grammar_of_schema(schema: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", embedded_schema(schema))


def embedded_schema(schema: dict[str, Any]) -> str:
    """The schema with our spacing, as it may also stand behind %json in Lark. Equal schemas give equal texts."""
    return _written({**schema, "x-guidance": JSON_SPACING})


def _written(schema: dict[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False)


_LARK_TEXTS: Final = re.compile(r'(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\])*/?')
"""Comments, strings and regular expressions of a Lark grammar, open ones too: so none is gone through twice."""
_LARK_NOT_TAKEN: Final = re.compile("%json|%llguidance|%regex|[<@]")
_LARK_ATTRIBUTES: Final = re.compile(r"\[([^\[\]]*)\]\s*:")
_LARK_ATTRIBUTES_TAKEN: Final = frozenset({"lazy", "stop", "suffix", ""})
_ESCAPED: Final = str.maketrans({char: f"\\{char}" for char in string.punctuation if char not in "<>"})
"""What the grammar library lets a backslash stand before: of ASCII all but letters, digits, < and >."""
ANY_OBJECT: Final = grammar_of_schema({"type": "object"})


def grammar_of(
    schema: dict[str, Any] | None, regex: str | None, choice: list[str] | None, lark: str | None
) -> tuple[Grammar, str] | None:
    """The first that is given, and its name."""
    if schema is not None:
        return grammar_of_schema(schema), "json"
    if regex is not None:
        return Grammar("regex", regex), "regex"
    if choice is not None:
        return Grammar("regex", "|".join(f"(?:{_literal(text)})" for text in choice)), "choice"
    return None if lark is None else (Grammar("lark", lark), "grammar")


def _literal(text: str) -> str:
    """A regular expression that matches this text alone, at most twice as long."""
    return text.translate(_ESCAPED)
