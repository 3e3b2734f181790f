"""Every split of an answer's text gives the same calls, and what is no call is content to the letter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from coordinator.tools.calls import (
    Arguments,
    CallBegun,
    Content,
    Rule,
    ToolCallParser,
    hermes,
    llama3_json,
    mistral,
)

NAMES = ("get", "put-it")
Calls = list[tuple[str, str]]


def read(rule: Rule, pieces: list[str]) -> tuple[str, Calls]:
    """Content and calls, joined. Checks on the way that events come in order and none is empty."""
    parser = ToolCallParser(rule, NAMES)
    content = ""
    calls: Calls = []
    for event in [event for piece in pieces for event in parser.push(piece)] + parser.end():
        match event:
            case Content(text):
                assert text
                content += text
            case CallBegun(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case Arguments(index, text):
                assert text and index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    assert parser.calls == len(calls)
    return content, calls


def hermes_call(arguments: str, name: str = "get") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


A = '{"a": "}\\"{ </tool_call>", "b": [1, {"c": "\\\\"}]}'
CASES: list[tuple[Rule, str, str, Calls]] = [
    (hermes, "", "", []),
    (hermes, " plain <b>text</b> ", " plain <b>text</b> ", []),
    (hermes, hermes_call(A), "", [("get", A)]),
    (
        hermes,
        f"Sure.\n{hermes_call(A)}\n{hermes_call('{}', 'put-it')}\n",
        "Sure.\n",
        [("get", A), ("put-it", "{}")],
    ),
    (hermes, f"{hermes_call('{}')} and {hermes_call(A)} done", " and  done", [("get", "{}"), ("get", A)]),
    (hermes, f"\n\n{hermes_call('{}')}", "", [("get", "{}")]),
    (hermes, "\n\n", "\n\n", []),
    (hermes, '<tool_call>{"arguments":{"x":1},"name":"get","id":"7"}</tool_call>', "", [("get", '{"x":1}')]),
    (hermes, '<tool_call>{"name": "get"}</tool_call>', "", [("get", "{}")]),
    (hermes, hermes_call("{}", "unknown"), hermes_call("{}", "unknown"), []),
    (
        hermes,
        f"<tool_<tool_call>no<tool_call> {hermes_call(A)}",
        "<tool_<tool_call>no<tool_call> ",
        [("get", A)],
    ),
    (
        hermes,
        '<tool_call>{"name": "get", "arguments": [1]}',
        '<tool_call>{"name": "get", "arguments": [1]}',
        [],
    ),
    (hermes, '<tool_call>{"other": 1}</tool_call>', '<tool_call>{"other": 1}</tool_call>', []),
    # Cut by max_tokens, at every stage.
    (hermes, "x <tool_", "x <tool_", []),
    (hermes, '<tool_call>\n{"name": "ge', '<tool_call>\n{"name": "ge', []),
    (hermes, '<tool_call>\n{"name": "get", "arguments": {"a": [1, "', "", [("get", '{"a": [1, "')]),
    (hermes, '<tool_call>{"name": "get", "arguments": {}}</tool', "", [("get", "{}")]),
    (hermes, '<tool_call>{"name": "get", "arguments": {}}', "", [("get", "{}")]),
    # What follows the arguments and is no call any more is not lost.
    (
        hermes,
        '<tool_call>{"name": "get", "arguments": {}, oh</tool_call>',
        ", oh</tool_call>",
        [("get", "{}")],
    ),
    (llama3_json, '{"name": "get", "parameters": {"x": 1}}', "", [("get", '{"x": 1}')]),
    (llama3_json, f' <|python_tag|>{{"name": "get", "parameters": {A}}}', "", [("get", A)]),
    (
        llama3_json,
        '{"type": "function", "name": "get", "parameters": {}}; {"name": "put-it", "parameters": {"y": 2}}',
        "",
        [("get", "{}"), ("put-it", '{"y": 2}')],
    ),
    (llama3_json, '{"answer": {"name": "get"}}', '{"answer": {"name": "get"}}', []),
    (llama3_json, 'So: {"name": "get", "parameters": {}}', 'So: {"name": "get", "parameters": {}}', []),
    (llama3_json, '{"name": "get", "parameters": {}} ok', " ok", [("get", "{}")]),
    (llama3_json, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (llama3_json, "", "", []),
    (
        mistral,
        f'[TOOL_CALLS] [{{"name": "get", "arguments": {A}, "id": "0"}}, {{"name": "put-it", "arguments": {{}}}}]',
        "",
        [("get", A), ("put-it", "{}")],
    ),
    (mistral, f"Yes.[TOOL_CALLS]get[ARGS]{A}[TOOL_CALLS]put-it{{}}", "Yes.", [("get", A), ("put-it", "{}")]),
    (mistral, '[TOOL_CALLS]get[CALL_ID]abcdefghi[ARGS]{"x": 1}', "", [("get", '{"x": 1}')]),
    (mistral, "[TOOL_CALLS]unknown{}", "[TOOL_CALLS]unknown{}", []),
    (mistral, "[1, 2] [TOOL_[TOOL_CALLS] [3]", "[1, 2] [TOOL_[TOOL_CALLS] [3]", []),
    (mistral, '[TOOL_CALLS] [{"name": "get", "arguments": {"x', "", [("get", '{"x')]),
]


@pytest.mark.parametrize(("rule", "text", "content", "calls"), CASES)
def test_content_and_calls(rule: Rule, text: str, content: str, calls: Calls) -> None:
    assert read(rule, [text]) == (content, calls)
    assert read(rule, list(text)) == (content, calls)
    for cut in range(len(text)):
        assert read(rule, [text[:cut], text[cut:]]) == (content, calls)


RULES: list[tuple[Rule, list[str]]] = [
    (hermes, ["<tool_call>", "</tool_call>", "\n", "<", "x "]),
    (llama3_json, ["<|python_tag|>", "; ", "x", " "]),
    (mistral, ["[TOOL_CALLS]", "[ARGS]", "[", "]", ", ", "get"]),
]
FRAGMENTS = [
    '{"name": "get", ',
    '"arguments": ',
    '"parameters": ',
    '{"a": 1}',
    "}",
    '"',
    "\\",
    '{"name": "get"}',
    "é😀",
]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_split_of_any_text_gives_the_same_and_loses_nothing(data: Any) -> None:
    rule, marks = data.draw(st.sampled_from(RULES))
    text = "".join(data.draw(st.lists(st.sampled_from(marks + FRAGMENTS), max_size=14)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(rule, [text])
    assert read(rule, pieces) == whole
    content, calls = whole
    if not calls:
        assert content == text


def test_arguments_are_told_as_they_come() -> None:
    parser = ToolCallParser(hermes, NAMES)
    assert parser.push('Hi <tool_call>{"name": "get", "arguments": ') == [Content("Hi ")]
    assert parser.push('{"a') == [CallBegun(0, "get"), Arguments(0, '{"a')]
    assert parser.push('": 1}') == [Arguments(0, '": 1}')]
    assert parser.push("}</tool_call>\n") == []
    assert parser.end() == []


def test_content_is_held_back_only_where_a_call_may_begin() -> None:
    parser = ToolCallParser(hermes, NAMES)
    assert [parser.push(text) for text in ("a", " b", "<", "c", "\n", "d")] == [
        [Content("a")],
        [Content(" b")],
        [],
        [Content("<c")],
        [Content("\n")],
        [Content("d")],
    ]


def test_valid_arguments_stay_valid() -> None:
    for value in ({}, {"a": [{}, [], "}{", '"\\'], "é😀": None}, {"x": {"y": {"z": [[[1]]]}}}):
        for text in (json.dumps(value), json.dumps(value, indent=2), json.dumps(value, ensure_ascii=False)):
            assert json.loads(read(hermes, [hermes_call(text)])[1][0][1]) == value
