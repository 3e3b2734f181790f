"""A forced answer is calls and nothing else, in the family's own format; auto reads the family off the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as Encoder

from coordinator.tools.calls import CallBegun, Content, ToolCallParser
from coordinator.tools.families import FAMILIES, MAX_FORCED_CALLS, Family, family_of

MARKERS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
FUNCTIONS: dict[str, dict[str, Any] | None] = {
    "get": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"A": {"type": "integer"}},
    },
    "put": None,
    "any": {},
}
HERMES = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
FORMATS: list[tuple[str, list[str], str, str, str, str]] = [
    # family, tokens of their own, before, one call, between, after
    ("hermes", [], "", HERMES, "\n", ""),
    ("hermes", ["<tool_call>", "</tool_call>"], "", HERMES, "\n", ""),
    ("llama3_json", ["<|python_tag|>"], "", '{"name": "%s", "parameters": %s}', "; ", ""),
    ("mistral", [], "[TOOL_CALLS][", '{"name": "%s", "arguments": %s}', ", ", "]"),
    ("mistral", ["[TOOL_CALLS]"], "[TOOL_CALLS][", '{"name": "%s", "arguments": %s}', ", ", "]"),
    ("mistral", ["[TOOL_CALLS]", "[ARGS]"], "", "[TOOL_CALLS]%s[ARGS]%s", "", ""),
]


@pytest.fixture(scope="module")
def encoders(smollm2_dir: Path) -> dict[bool, tuple[Encoder, LLTokenizer]]:
    """Without and with markers that are tokens of their own."""
    found = {}
    for has_markers in (False, True):
        encoder = Encoder.from_file(str(smollm2_dir / "tokenizer.json"))
        if has_markers:
            encoder.add_special_tokens([marker for family in FAMILIES.values() for marker in family.markers])
        found[has_markers] = (encoder, LLTokenizer(encoder.to_str(), eos_token=2))
    return found


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form[0]}-{len(form[1])}")
def test_a_forced_answer(
    encoders: dict[bool, tuple[Encoder, LLTokenizer]],
    form: tuple[str, list[str], str, str, str, str],
) -> None:
    name, markers, before, one, between, after = form
    encoder, tokenizer = encoders[bool(markers)]
    family = FAMILIES[name].with_vocabulary({marker: encoder.token_to_id(marker) or 0 for marker in markers})

    def fits(parallel: bool, *calls: tuple[str, str]) -> bool:
        text = before + between.join(one % call for call in calls) + after
        ids = encoder.encode(text, add_special_tokens=False).ids
        lark = LLMatcher.grammar_from_lark(family.forced(FUNCTIONS, parallel).text)
        assert LLMatcher.validate_grammar(lark, tokenizer) == ""
        state = LLMatcher(tokenizer, lark)
        fitting = state.try_consume_tokens(ids) == len(ids) and state.is_accepting()
        if fitting:  # what is forced is read again
            events = ToolCallParser(family.rule, FUNCTIONS).push(text)
            assert [event.name for event in events if isinstance(event, CallBegun)] == [
                call[0] for call in calls
            ]
            assert not any(isinstance(event, Content) for event in events)
        return fitting

    good = ("get", '{"a": 3, "b": "é"}')
    assert fits(False, good) and fits(True, good)
    assert fits(False, ("put", "{}")) and fits(False, ("any", '{"x": [1, null]}'))
    assert fits(True, good, ("put", "{}"), good)
    assert fits(True, *[good] * MAX_FORCED_CALLS)
    assert not fits(True, *[good] * (MAX_FORCED_CALLS + 1))
    assert not fits(False, good, good)
    for bad in (("get", "{}"), ("get", '{"a": "3"}'), ("put", '{"x": 1}'), ("any", "[]"), ("other", "{}")):
        assert not fits(True, bad)
    assert not fits(True)


@dataclass
class Template:
    sources: str
    has_place_for_tools: bool = True


@pytest.mark.parametrize(
    ("template", "tokens", "family"),
    [
        (None, [], "hermes"),
        (Template("… <tool_call> …"), ["<tool_call>", "</tool_call>", "[TOOL_CALLS]"], "hermes"),
        (Template("[TOOL_CALLS]"), [], "mistral"),
        (Template(""), ["[TOOL_CALLS]"], "mistral"),
        (Template(""), ["<|python_tag|>"], "llama3_json"),
        (Template("", has_place_for_tools=False), ["<|python_tag|>"], "hermes"),
        (Template(""), [], "hermes"),
    ],
)
def test_auto_reads_the_family_off_template_and_vocabulary(
    template: Template | None, tokens: list[str], family: str
) -> None:
    ids = {token: id for id, token in enumerate(tokens)}
    found: Family = family_of(template, ids)
    assert found.name == family
    assert found.marker_ids == {marker: ids[marker] for marker in found.markers if marker in ids}
    assert family_of(template, ids, "mistral").name == "mistral"


def test_ids_of_calls_differ() -> None:
    places = [(request, choice, index) for request in "ab" for choice in (0, 1, 11) for index in (0, 1, 11)]
    for family in FAMILIES.values():
        ids = {family.call_id(*place) for place in places}
        assert len(ids) == len(places)
