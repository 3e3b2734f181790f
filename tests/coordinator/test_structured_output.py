"""From fields to a grammar, and every way in which one is refused at the edge: 400, by name, without an echo."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from typing import Any

import pytest
from llguidance import LLMatcher

from common.errors import BadRequest, NotAdmitted
from common.request import Grammar
from coordinator import grammar_check, structured_output
from coordinator.openai import formats, schema_keywords
from coordinator.openai.formats import ANY_OBJECT, JSON_SPACING, grammar_of
from coordinator.openai.schema import read_chat, read_text
from coordinator.structured_output import StructuredOutput
from coordinator.tokenizer import Tokenizer
from kernels import grammar as kernels_grammar

TEXT = {"model": "m", "prompt": "p"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
SPACED = json.dumps({**PERSON, "x-guidance": JSON_SPACING})


def named(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


@pytest.fixture(scope="module")
def structured(tokenizer: Tokenizer) -> StructuredOutput:
    made = StructuredOutput(tokenizer)
    made.prepare()
    return made


def refusal_of(structured: StructuredOutput, body: dict[str, Any]) -> BadRequest:
    """Of the fields, or of the check after them."""
    with pytest.raises(BadRequest) as caught:
        fields = read_text(TEXT | body)
        assert fields.form is not None
        asyncio.run(structured.check(*fields.form))
    return caught.value


# ---------------------------------------------------------------- fields to a grammar


@pytest.mark.parametrize(
    ("body", "grammar", "param"),
    [
        (named(PERSON), Grammar("json_schema", SPACED), "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT, "response_format"),
        ({"structured_outputs": {"json": PERSON}}, Grammar("json_schema", SPACED), "structured_outputs.json"),
        (
            {"structured_outputs": {"json": json.dumps(PERSON), "disable_any_whitespace": True}},
            Grammar("json_schema", SPACED),
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+"), "structured_outputs.regex"),
        (
            {"structured_outputs": {"choice": ["a.b", "é/😀"]}},
            Grammar("regex", r"(?:a\.b)|(?:é\/😀)"),
            "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}},
            Grammar("lark", 'start: "a"'),
            "structured_outputs.grammar",
        ),
        ({"guided_json": PERSON}, Grammar("json_schema", SPACED), "guided_json"),
        ({"guided_regex": "a"}, Grammar("regex", "a"), "guided_regex"),
        ({"guided_choice": ["a"]}, Grammar("regex", "(?:a)"), "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"'), "guided_grammar"),
    ],
)
def test_every_spelling_comes_down_to_a_grammar(
    body: dict[str, Any], grammar: Grammar, param: str, structured: StructuredOutput
) -> None:
    for fields in (read_text(TEXT | body), read_chat(CHAT | body)):
        assert fields.form == (grammar, param)
        asyncio.run(structured.check(*fields.form))


def test_what_asks_for_nothing() -> None:
    for body in ({}, {"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}):
        assert read_chat(CHAT | body).form is None


def test_strict_and_description_change_nothing() -> None:
    plain = named(PERSON)
    told = named(PERSON)
    told["response_format"]["json_schema"] |= {"strict": True, "description": "x" * 2000}
    assert read_chat(CHAT | plain).form == read_chat(CHAT | told).form


def test_a_choice_is_literal(structured: StructuredOutput, tokenizer: Tokenizer) -> None:
    """Every character of ASCII that tokens have, and some that are in no class or two."""
    texts = ["".join(map(chr, range(32, 127))), "\n\t", "a|b", ".*", "\\d", "(", "é😀\u2028ſ"]
    found = grammar_of(None, None, texts, None)
    assert found is not None
    assert structured._checker.fault(found[0]) is None
    library = structured._checker._tokenizer
    assert library is not None
    compiled = LLMatcher(library, LLMatcher.grammar_from_regex(found[0].text))
    for text in texts:
        state = compiled.deep_copy()
        assert state.consume_tokens(tokenizer.encode_now(text)) and state.is_accepting()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"guided_choice": ["-" * 65_000] * 64}, "guided_choice"),
        ({"structured_outputs": {"choice": ["-" * 17] * 4096}}, "structured_outputs.choice"),
        ({"guided_json": {"type": "object", "description": "x" * 4_000_000}}, "guided_json"),
        ({"guided_json": json.dumps({"properties": {str(i): {} for i in range(200_000)}})}, "guided_json"),
        (named({"properties": {str(i): {} for i in range(200_000)}}), "response_format.json_schema.schema"),
    ],
)
def test_a_form_that_is_too_long_is_refused_before_anything_is_done_with_it(
    body: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, name in ((formats, "parse_object"), (formats, "_literal"), (schema_keywords, "first_fault")):
        monkeypatch.setattr(place, name, lambda _: pytest.fail("it was gone through"))
    with pytest.raises(BadRequest, match="is longer than 65536 bytes") as caught:
        read_text(TEXT | body)
    assert caught.value.param == field


def test_a_form_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def literal(text: str) -> str:
        made.append(text)
        return text

    monkeypatch.setattr(formats, "_literal", literal)
    fields = read_text(TEXT | {"guided_choice": ["a"]})
    assert fields.form is fields.form and made == ["a"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "n", "schema": {}}}},
            "response_format",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{secret"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'start: %json {"x": 1}'}}, "structured_outputs.grammar"),
        ({"guided_json": PERSON, "guided_regex": "a"}, "guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_fields_that_contradict_themselves(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_text(TEXT | body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "secret" not in caught.value.message


# ---------------------------------------------------------------- what answers cannot be held to


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems: answers cannot be held to this keyword"),
        ({"properties": {"a": {"minLenght": 3}}}, "at properties.a, minLenght: answers cannot be held"),
        ({"anyOf": [{"type": "string"}, {"not": {}}]}, r"at anyOf\[1\], not: answers cannot"),
        ({"$defs": {"x": {"if": {}}}, "$ref": "#/$defs/x"}, r"at \$defs.x, if: answers cannot"),
        ({"x-guidance": {"lenient": True}}, "x-guidance: answers cannot be held"),
        ({"items": [{}]}, "items: must be one schema"),
        ({"items": 3}, "at items, must be an object or a boolean"),
        ({"properties": {"a": 3}}, "at properties.a, must be an object or a boolean"),
        ({"properties": []}, "properties: must be an object"),
        ({"anyOf": {}}, "anyOf: must be a list"),
        ({"type": "secret"}, "type: is not a type of JSON"),
        ({"type": "string", "format": "secret"}, "format: is not one"),
        ({"type": "string", "pattern": "(?=secret)b"}, "pattern: look-ahead"),
        ({"type": "string", "pattern": "(secret)\\1"}, "pattern: back-references"),
        ({"type": "string", "pattern": "(secret"}, "pattern: is not a regular expression"),
        (
            {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "number"}]},
            "oneOf: branches that may overlap",
        ),
        ({"$ref": "https://secret.example/x"}, r"\$ref: must lead to a schema of this document"),
        ({"$ref": "#/examples/0", "examples": [{"minLenght": 3}]}, r"\$ref: must lead to a schema of this"),
        ({"$ref": "#/$defs/a/const", "$defs": {"a": {"const": {}}}}, r"\$ref: must lead to a schema of this"),
        ({"$ref": "#/$defs/secret"}, r"\$ref: must point to something inside"),
        ({"enum": []}, "no value can fulfil it"),
        ({"type": "string", "minLength": 9, "maxLength": 3}, "no value can fulfil it"),
        ({"type": "string", "pattern": "^(a{1000}){1000}$"}, "asks for more than the limits"),
        ({"enum": ["secret" * 9000, "b" * 20_000]}, "is longer than 65536 bytes"),
        ({"const": "\ud800"}, "surrogate"),
    ],
)
def test_a_refused_schema_names_its_keyword(schema: Any, words: str, structured: StructuredOutput) -> None:
    error = refusal_of(structured, named(schema))
    assert (error.status, error.param) == (400, "response_format.json_schema.schema")
    assert error.message.startswith("response_format.json_schema.schema: ")
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(error.message)
    assert "secret" not in error.message and len(error.message) < 200


@pytest.mark.parametrize("body", [{"guided_regex": "(secret"}, {"guided_grammar": "start: secret"}])
def test_other_refused_grammars(body: dict[str, Any], structured: StructuredOutput) -> None:
    error = refusal_of(structured, body)
    assert error.param in body and "secret" not in error.message


@pytest.mark.parametrize(
    ("lark", "words"),
    [
        ('start: "a" <[2]>', "< is not taken here"),
        ("start: <|im_end|>", "< is not taken here"),
        ("start: @other", "@ is not taken here"),
        ('start: "a" // "\nb: %json {}', "%json is not taken here"),
        ('start: a\na[temperature=2.0]: "x"', "no attributes of rules but"),
        ('start: a\na [lazy, max_tokens = 3] : "x"', "no attributes of rules but"),
    ],
)
def test_lark_that_answers_are_not_held_to(lark: str, words: str, structured: StructuredOutput) -> None:
    assert words in refusal_of(structured, {"guided_grammar": lark}).message


@pytest.mark.parametrize(
    "lark",
    [
        'start: "<[2]> @ %json a[temperature=1]:" /<@%json[x]:/ // <a>\n# %json',
        'start: "a" ["b" | "c"]',
        'start: a\na[stop="]"]: /b+/',
        "start: a\na[lazy]: /.*x/",
        "%import common.INT\nstart: INT",
    ],
)
def test_lark_that_they_are_held_to(lark: str, structured: StructuredOutput) -> None:
    form = read_text(TEXT | {"guided_grammar": lark}).form
    assert form is not None
    asyncio.run(structured.check(*form))


@pytest.mark.parametrize("piece", ['"', "/", '"\\', "/a\\\n", "[lazy,", "] ", "[", "a[stop = , "])
def test_no_lark_is_gone_through_twice(piece: str) -> None:
    started = time.perf_counter()
    with contextlib.suppress(BadRequest):
        read_text(TEXT | {"guided_grammar": piece * (60_000 // len(piece))})
    assert time.perf_counter() - started < 1, "a hundred times of what it takes"


def test_values_are_not_schemas() -> None:
    for keyword in ("enum", "examples"):
        assert schema_keywords.first_fault({keyword: [{"not": 1}]}) is None
    for keyword in ("const", "default"):
        assert schema_keywords.first_fault({keyword: {"not": 1}}) is None
    assert schema_keywords.first_fault({"properties": {"not": {"type": "string"}, "x": True}}) is None
    assert schema_keywords.first_fault({"additionalProperties": {"not": {}}}) is not None
    assert schema_keywords.first_fault({"x-order": 3, "title": "t"}) is None


def test_stop_ids_that_have_a_text_could_be_the_only_way_on(
    structured: StructuredOutput, tokenizer: Tokenizer
) -> None:
    special = sorted(tokenizer.special_ids)[:2]
    structured.check_stop_ids(special)
    with pytest.raises(BadRequest, match=r"^stop_token_ids: may hold special tokens only"):
        structured.check_stop_ids([*special, 1000])
    with pytest.raises(BadRequest, match="none that a forced call is written with"):
        structured.check_stop_ids(special, written=special[1:])


def test_the_edge_refuses_by_the_limits_of_the_workers() -> None:
    fuel = ("initial_lexer_fuel", "step_lexer_fuel", "step_max_items", "max_lexer_states", "max_grammar_size")
    for name in (*fuel, "max_items_in_row", "precompute_large_lexemes"):
        assert getattr(grammar_check.limits(), name) == getattr(kernels_grammar.limits(), name), name
    assert grammar_check.MAX_TEXT_BYTES == kernels_grammar.MAX_TEXT_BYTES


# ---------------------------------------------------------------- the thread


class Slow:
    """A checker that waits to be let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked: list[str] = []

    def fault(self, grammar: Grammar) -> str | None:
        self.asked.append(grammar.text)
        self.go.wait(5)
        return "is bad" if grammar.text == "bad" else None


@pytest.fixture
def slow(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> tuple[StructuredOutput, Slow]:
    structured, checker = StructuredOutput(tokenizer), Slow()
    monkeypatch.setattr(structured, "_checker", checker)
    return structured, checker


def test_one_compile_for_all_who_ask_and_none_for_who_asks_again(slow: tuple[StructuredOutput, Slow]) -> None:
    structured, checker = slow

    async def ask() -> None:
        asking = [asyncio.create_task(structured.check(Grammar("regex", "a"), "p")) for _ in range(5)]
        await asyncio.sleep(0.05)
        asking[0].cancel()  # its client left; the others still wait
        checker.go.set()
        await asyncio.gather(*asking[1:])
        await structured.check(Grammar("regex", "a"), "p")
        for _ in range(2):
            with pytest.raises(BadRequest, match=r"^p: is bad\.$"):
                await structured.check(Grammar("regex", "bad"), "p")

    asyncio.run(ask())
    assert checker.asked == ["a", "bad"]


def test_more_than_may_wait_and_longer_than_one_may(
    slow: tuple[StructuredOutput, Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    structured, checker = slow
    monkeypatch.setattr(structured_output, "MAX_WAITING", 2)
    monkeypatch.setattr(structured_output, "TIME_LIMIT_S", 0.1)

    async def ask(text: str) -> None:
        await structured.check(Grammar("regex", text), "p")

    async def ask_all() -> list[BaseException | None]:
        return await asyncio.gather(*(ask(text) for text in "abc"), return_exceptions=True)

    started = time.monotonic()
    found = asyncio.run(ask_all())
    assert all(isinstance(error, NotAdmitted) and error.code == "grammars_busy" for error in found)
    assert checker.asked == ["a"] and time.monotonic() - started < 2
    checker.go.set()


def test_what_is_known_is_bounded(
    slow: tuple[StructuredOutput, Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    structured, checker = slow
    checker.go.set()
    monkeypatch.setattr(structured_output, "MAX_KNOWN", 3)

    async def ask() -> None:
        for text in "abcdea":
            await structured.check(Grammar("regex", text), "p")

    asyncio.run(ask())
    assert checker.asked == list("abcdea") and len(structured._known) == 3


def test_what_is_too_long_is_neither_judged_nor_kept(slow: tuple[StructuredOutput, Slow]) -> None:
    structured, checker = slow
    checker.go.set()
    long = Grammar("lark", "a" * 65_537)
    with pytest.raises(BadRequest, match=r"^tools: is longer than 65536 bytes\.$"):
        asyncio.run(structured.check(long, "tools"))
    assert not checker.asked and not structured._known


def test_what_is_known_does_not_keep_the_text(slow: tuple[StructuredOutput, Slow]) -> None:
    structured, checker = slow
    checker.go.set()
    for grammar in (
        Grammar("regex", "a" * 60_000),
        Grammar("lark", "a" * 60_000),
        Grammar("regex", "\ud800"),
    ):
        asyncio.run(structured.check(grammar, "p"))
    assert len(checker.asked) == 3 and sum(map(len, structured._known)) == 48
