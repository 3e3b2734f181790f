"""Compiles grammars as a worker will, to say at the edge what a worker would have to refuse.

The words of the library can quote the grammar, which is the user's; what is said here names the keyword at most.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.request import Grammar

MAX_TEXT_BYTES = 64 << 10
TRIED_TOKENS = 4
TOO_LARGE = "asks for more than the limits of the grammar library allow; make it smaller"

_REFUSED = "is refused by the grammar library"
_SAID: tuple[tuple[str, str], ...] = (
    (r"doesn't satisfy the grammar", _REFUSED),  # goes on with what was expected, which may hold any word
    (r"too (big|many|complex|large)|limit|fuel|items; max", TOO_LARGE),
    (r"NoExtension", "asks for bytes that no token of this model has"),
    (r"oneOf", "oneOf: branches that may overlap cannot be told apart; use anyOf"),
    (r"Unsatisfiable", "no value can fulfil it"),
    (r"Unknown format", "format: is not one that answers can be held to"),
    (r"look-around|lookaround", "pattern: look-ahead, look-behind and word borders cannot be held to"),
    (r"backreference", "pattern: back-references cannot be held to"),
    (r"invalid regex|regex parse", "pattern: is not a regular expression that can be held to"),
    (r"[Rr]esource|[Pp]ointer|\$ref", "$ref: must point to something inside the same schema"),
    (r"Invalid type", "type: is not a type of JSON"),
)


def limits() -> LLParserLimits:
    """Those of `kernels/grammar.py`, which says why; a test compares them."""
    return LLParserLimits(
        initial_lexer_fuel=100_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=10_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class GrammarChecker:
    """For one thread at a time. Reading the tokenizer holds the interpreter for half a second: see `prepare`."""

    def __init__(self, folder: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self._tokenizer: LLTokenizer | None = None

    def prepare(self) -> None:
        if self._tokenizer is None:
            text = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._end_ids or None)

    def fault(self, grammar: Grammar) -> str | None:
        """Why no worker could hold an answer to it; None where one can. A sentence without subject and end."""
        try:
            if len(grammar.text.encode()) > MAX_TEXT_BYTES:
                return f"is longer than {MAX_TEXT_BYTES} bytes"
        except UnicodeEncodeError:
            return "holds half of a surrogate pair, which is not text"
        self.prepare()
        assert self._tokenizer is not None
        # Unlike the library's functions that only validate, this leaves the interpreter to others meanwhile.
        state = LLMatcher(self._tokenizer, _spelled(grammar), log_level=0, limits=limits())
        warnings = state.get_grammar_warnings()
        if state.is_error() or warnings:  # a warning says that something is ignored: as good as a refusal
            return _plain(state.get_error() or warnings[0])
        for step in range(TRIED_TOKENS):
            mask = state.compute_logit_bias()
            allowed = next((token_id for token_id, bias in enumerate(mask) if bias), None)
            fault = _plain(state.get_error() or "NoExtension")
            if state.is_error() or allowed is None:
                return fault if step == 0 or fault == TOO_LARGE else None
            state.consume_token(allowed)
        return None


def _spelled(grammar: Grammar) -> str:
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


def _plain(said: str) -> str:
    keys = re.search(r'Unimplemented keys: \["([$A-Za-z]+)"', said)
    if keys is not None:
        return f"{keys[1]}: answers cannot be held to this keyword"
    return next((words for sign, words in _SAID if re.search(sign, said)), _REFUSED)
