"""How the families of models write their tool calls: what is read, what is forced, what is told. Pure.

A forced answer has the shape that the family was trained on, with arguments that the function's schema allows, so
whoever reads it needs no other rule than for a free one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from common.request import Grammar
from coordinator.openai.formats import embedded_schema
from coordinator.tools.calls import Rule, hermes, llama3_json, mistral

FamilyName = Literal["hermes", "llama3_json", "mistral"]
MAX_FORCED_CALLS = 8
"""Of an answer that must hold calls and may hold several: some end must be sure."""
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_SHAPES = ("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_MISTRAL_ID_CHARS = 9


@dataclass(frozen=True, slots=True)
class Family:
    """One way of writing calls. `markers` may be tokens of their own, and special ones, whose text an answer lacks;
    `marker_ids` are those that are."""

    name: FamilyName
    rule: Rule
    markers: tuple[str, ...]
    marker_ids: Mapping[str, int]
    shape: Callable[[Mapping[str, int], bool], str]
    argument_key: str

    def with_vocabulary(self, added_ids: Mapping[str, int]) -> Family:
        """The family as a model has it whose tokens outside the vocabulary's rules are these."""
        found = {marker: added_ids[marker] for marker in self.markers if marker in added_ids}
        return replace(self, marker_ids=found)

    def forced(self, functions: Mapping[str, dict[str, Any] | None], parallel: bool) -> Grammar:
        """An answer of one call of one of these functions (name → schema of its parameters), or of up to
        MAX_FORCED_CALLS if `parallel`."""
        lines = [self.shape(self.marker_ids, parallel)]
        lines.append("body: " + " | ".join(f"body_{index}" for index in range(len(functions))))
        for index, (name, schema) in enumerate(functions.items()):
            lines.append(
                f"body_{index}: {self._body(name)[0]} arguments_{index} {self._body(name)[1]}".rstrip()
            )
            lines.append(f"arguments_{index}: %json {embedded_schema(_of_arguments(schema))}")
        return Grammar("lark", "\n".join(lines))

    def _body(self, name: str) -> tuple[str, str]:
        if "[ARGS]" in self.marker_ids:
            return f"{_text(name)} {_marker('[ARGS]', self.marker_ids)}", ""
        return _text(f'{{"name": "{name}", "{self.argument_key}": '), _text("}")

    def call_id(self, request_id: str, choice: int, index: int) -> str:
        """An id that no other call has. Templates of Mistral models take nine letters and digits and no others."""
        digest = hashlib.blake2b(f"{request_id} {choice} {index}".encode(), digest_size=12).hexdigest()
        return digest[:_MISTRAL_ID_CHARS] if self.name == "mistral" else f"call_{digest}"


def _of_arguments(schema: dict[str, Any] | None) -> dict[str, Any]:
    """What arguments must be. OpenAI: a function without parameters takes an empty object."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return schema if any(key in schema for key in _SHAPES) else _ANY_OBJECT | schema


def _text(text: str) -> str:
    return json.dumps(text)


def _marker(marker: str, ids: Mapping[str, int]) -> str:
    return f"<[{ids[marker]}]>" if marker in ids else _text(marker)


def _several(rule: str, between: str, parallel: bool) -> str:
    return f"{rule} ({between} {rule}){{0,{MAX_FORCED_CALLS - 1}}}" if parallel else rule


def _hermes_shape(ids: Mapping[str, int], parallel: bool) -> str:
    opened, closed = _marker("<tool_call>", ids), _marker("</tool_call>", ids)
    start = _several("call", _text("\n"), parallel)
    return f'start: {start}\ncall: {opened} "\\n" body "\\n" {closed}'


def _llama3_shape(ids: Mapping[str, int], parallel: bool) -> str:
    return f"start: {_several('body', _text('; '), parallel)}"


def _mistral_shape(ids: Mapping[str, int], parallel: bool) -> str:
    opened = _marker("[TOOL_CALLS]", ids)
    if "[ARGS]" in ids:
        return f"start: {_several('call', '', parallel)}\ncall: {opened} body"
    return f'start: {opened} "[" {_several("body", _text(", "), parallel)} "]"'


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("hermes", hermes, ("<tool_call>", "</tool_call>"), {}, _hermes_shape, "arguments"),
        Family("llama3_json", llama3_json, ("<|python_tag|>",), {}, _llama3_shape, "parameters"),
        Family("mistral", mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), {}, _mistral_shape, "arguments"),
    )
}


class Template(Protocol):
    """A chat template, as far as it tells of tools."""

    sources: str
    has_place_for_tools: bool


def family_of(template: Template | None, tokens: Mapping[str, int], parser: str = "auto") -> Family:
    """The family of a model with this template and these tokens outside its vocabulary's rules. `parser` names it, or
    leaves it to them; where they speak of none it is Hermes, as tools without a place in the template are told so."""
    name = _spoken_of(template, tokens) if parser == "auto" else parser
    return FAMILIES[name].with_vocabulary(tokens)


def _spoken_of(template: Template | None, tokens: Mapping[str, int]) -> str:
    if template is None or not template.has_place_for_tools or "<tool_call>" in template.sources:
        return "hermes"
    if "[TOOL_CALLS]" in template.sources or "[TOOL_CALLS]" in tokens:
        return "mistral"
    if "<|python_tag|>" in template.sources or "<|python_tag|>" in tokens:
        return "llama3_json"
    return "hermes"
