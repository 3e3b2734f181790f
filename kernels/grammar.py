"""Which tokens a grammar allows next: compiled grammars of one model, and a matcher for each sequence.

A grammar is text (a JSON schema, a regex, or Lark as llguidance spells it); compiled against the model's tokenizer
it gives a mask over the vocabulary for every state. Nothing of that state ever travels: whoever continues a
sequence replays its output ids, and the same text and ids give the same mask.

Why limits: a pattern of twenty characters can ask for millions of automaton states. Fuel for the lexer bounds what
one compile and one mask may cost, by count and not by the clock, so that every worker refuses the same grammars:
about a second for the worst compile, a tenth of one for the worst mask, after which that request fails alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def _library() -> str:
    try:
        return f"llguidance {importlib.metadata.version('llguidance')}"
    except importlib.metadata.PackageNotFoundError:
        return "none"


LIBRARY = _library()
"""Part of a worker's fingerprint: two versions may allow different tokens. Imported when a tokenizer is read: a GPU is
checked (`bench/gpu_check.sh`) on machines that have no more than torch."""

MAX_TEXT_BYTES = 64 << 10
MAX_COMPILED = 64
MAX_COMPILE_IN_STEP_S = 0.05
TRIED_TOKENS = 4
TOO_LARGE = "is too large: a limit of the grammar library is reached"


def limits() -> LLParserLimits:
    """`coordinator/grammar_check.py` has the same ones: what passes there must not be refused here."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=100_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=10_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class BadGrammar(ValueError):
    """It cannot be compiled here; the message, a sentence without its subject, says why and quotes nothing."""


class GrammarFault(RuntimeError):
    """The matcher of one sequence cannot go on; the message says why and quotes nothing."""


class Matcher:
    """One sequence's place in its grammar.

    Copies of a compiled grammar share the automaton of its lexer, which grows with what all of them have read and
    has a limit. Where that limit is met, this sequence is replayed on a fresh one: so only what it has read itself
    can fail it, and who came before does not matter.
    """

    def __init__(self, compiler: GrammarCompiler, kind: str, text: str) -> None:
        self._compiler = compiler
        self._kind = kind
        self._text = text
        self._compiled = compiler.compile(kind, text)
        self._state = self._compiled.deep_copy()
        self._consumed: list[int] = []

    @property
    def num_consumed(self) -> int:
        return len(self._consumed)

    def consume(self, output_ids: Iterable[int]) -> None:
        """Raises GrammarFault where an id does not fit, which says that it was not drawn under this grammar."""
        for token_id in output_ids:
            if token_id < 0:  # the library raises an error of another kind over it
                raise GrammarFault("its grammar cannot go on with a negative id")
            self._consumed.append(token_id)
            if not self._state.consume_token(token_id):
                self._start_afresh_or_fail()

    def allowed(self, end_token_ids: Sequence[int]) -> np.ndarray:
        """bool `[vocab]`: what may come next. All of `end_token_ids` where the answer may end, else none of them.

        Raises GrammarFault where a limit is reached, or nothing is left.
        """
        packed = self._state.compute_bitmask()
        if self._state.is_error():
            self._start_afresh_or_fail()
            packed = self._state.compute_bitmask()
        bits = np.frombuffer(packed, dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._compiler.vocab_size, bitorder="little").view(bool)
        may_end = self._state.is_accepting()
        if not may_end:
            self._spell_out(allowed)
        allowed[self._compiler.own_ends] = False
        allowed[list(end_token_ids)] = may_end
        if not allowed.any():
            raise GrammarFault(f"its grammar {_reason('NoExtension')}")
        return allowed

    def _spell_out(self, allowed: np.ndarray) -> None:
        """Where one text alone can follow, the library allows the first token that the tokenizer makes of it, and
        none beside. Of a text like "<|im_end|>" that is a special token, which the same library then refuses: only the
        letters can stand there, and their longest token takes its place."""
        if np.count_nonzero(allowed) != 1 or self._state.validate_tokens([int(allowed.argmax())]):
            return
        plain = self._compiler.plain_token(self._state.compute_ff_bytes())
        if plain is not None and self._state.validate_tokens([plain]):
            allowed[:] = False
            allowed[plain] = True

    def _start_afresh_or_fail(self) -> None:
        is_new = False
        while self._state.is_error():
            reason = _reason(self._state.get_error())
            if is_new or reason != TOO_LARGE:
                raise GrammarFault(f"its grammar {reason}")
            self._compiled, is_new = self._compiler.instead_of(self._compiled, self._kind, self._text)
            self._state = self._compiled.deep_copy()
            if all(self._state.consume_token(token_id) for token_id in self._consumed):
                self._state.compute_bitmask()


class GrammarCompiler:
    """Compiled grammars of one model: those that are held, and else the last used ones. Threads may share it."""

    def __init__(self, folder: Path, vocab_size: int, capacity: int = MAX_COMPILED) -> None:
        self.vocab_size = vocab_size
        self.own_ends: list[int] = []
        self._folder = folder
        self._capacity = capacity
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._holds: Counter[tuple[str, str]] = Counter()
        self._slow: set[tuple[str, str]] = set()  # of the compiled ones; only looked up
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def __len__(self) -> int:
        return len(self._compiled)

    def __contains__(self, key: tuple[str, str]) -> bool:
        """Whether this kind and text is compiled."""
        return key in self._compiled

    def prepare(self) -> None:
        """Reads the tokenizer, which holds the interpreter for half a second: to be called before serving.

        Raises BadGrammar where the model has none.
        """
        with self._loading:
            if self._tokenizer is None:
                self.own_ends = end_ids(self._folder)
                self._tokenizer = load_tokenizer(self._folder, self.vocab_size, self.own_ends)

    def plain_token(self, text: bytes) -> int | None:
        """The longest token, none of the special ones, that `text` begins with."""
        assert self._tokenizer is not None
        return next(iter(self._tokenizer.greedy_tokenize(text.decode(errors="ignore"))), None)

    def compile(self, kind: str, text: str) -> LLMatcher:
        """Compiles it unless it is there, and makes it the last used one. Raises BadGrammar."""
        with self._lock:
            if (kind, text) in self._compiled:
                self._compiled.move_to_end((kind, text))
                return self._compiled[kind, text]
        return self._compile_anew(kind, text)

    def hold(self, kind: str, text: str) -> None:
        """What is held is not pushed out; as often as it is held, it must be let go."""
        with self._lock:
            self._holds[kind, text] += 1

    def let_go(self, kind: str, text: str) -> None:
        with self._lock:
            self._holds[kind, text] -= 1
            if not self._holds[kind, text]:
                del self._holds[kind, text]
                self._push_out()

    def matcher(self, kind: str, text: str, output_ids: Sequence[int]) -> Matcher:
        """At its beginning, `output_ids` replayed. Compiles only what is neither held nor among the last used.

        Raises BadGrammar and GrammarFault.
        """
        matcher = Matcher(self, kind, text)
        matcher.consume(output_ids)
        return matcher

    def instead_of(self, spent: LLMatcher, kind: str, text: str) -> tuple[LLMatcher, bool]:
        """Another compiled grammar than `spent`, and whether it is a new one that nobody has read with.

        Raises GrammarFault where a step would have to wait for it: whoever asks next compiles it beside the steps.
        """
        key = (kind, text)
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None and compiled is not spent:
                return compiled, False
            if key in self._slow:
                self._compiled.pop(key, None)
                self._slow.discard(key)
                raise GrammarFault(f"its grammar {TOO_LARGE}")
        return self._compile_anew(kind, text), True

    def _compile_anew(self, kind: str, text: str) -> LLMatcher:
        self.prepare()
        assert self._tokenizer is not None
        started = time.perf_counter()
        compiled = compile_grammar(self._tokenizer, kind, text)
        key, slow = (kind, text), time.perf_counter() - started > MAX_COMPILE_IN_STEP_S
        with self._lock:
            self._compiled[key] = compiled
            self._compiled.move_to_end(key)
            (self._slow.add if slow else self._slow.discard)(key)
            self._push_out()
        return compiled

    def _push_out(self) -> None:
        """The one compiled last stays in any case: whoever asked for it is about to hold it."""
        excess = len(self._compiled) - self._capacity
        for key in list(self._compiled)[:-1] if excess > 0 else ():
            if excess > 0 and key not in self._holds:
                del self._compiled[key]
                self._slow.discard(key)
                excess -= 1


def compile_grammar(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """A matcher at its beginning. What asks for too much often shows only when a token is read, so a few are tried.

    Raises BadGrammar.
    """
    from llguidance import LLMatcher

    if len(text.encode()) > MAX_TEXT_BYTES:
        raise BadGrammar(f"is longer than {MAX_TEXT_BYTES} bytes")
    state = LLMatcher(tokenizer, _grammar_of(kind, text), log_level=0, limits=limits())
    tried = state.deep_copy()
    for step in range(TRIED_TOKENS):
        bits = np.unpackbits(np.frombuffer(tried.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if tried.is_error() or not bits.any():
            reason = _reason(tried.get_error() or "NoExtension")
            if step == 0 or reason == TOO_LARGE:
                raise BadGrammar(reason)
            break
        tried.consume_token(int(bits.argmax()))
    return state


def _grammar_of(kind: str, text: str) -> str:
    from llguidance import LLMatcher

    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "lark":
        return LLMatcher.grammar_from_lark(text)
    raise BadGrammar("is of a kind that is not known here")


def _reason(error: str) -> str:
    """The library's words can quote the grammar, which is the user's; only what kind of fault it is goes on."""
    if "doesn't satisfy the grammar" in error:  # goes on with what was expected, which may hold any word
        return "is refused by the grammar library"
    too_large = ("too big", "too many", "too complex", "too large", "limit", "fuel", "items; max")
    if any(word in error.lower() for word in too_large):
        return TOO_LARGE
    if "NoExtension" in error:
        return "asks for bytes that no token of this model has"
    return "is refused by the grammar library"


def load_tokenizer(folder: Path, vocab_size: int, own_ends: Sequence[int]) -> LLTokenizer:
    """Raises BadGrammar."""
    from llguidance import LLTokenizer

    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(own_ends) or None)
    except (OSError, ValueError) as error:
        raise BadGrammar(
            "cannot be used: this model has no tokenizer.json that grammars can be held to"
        ) from error


def end_ids(folder: Path) -> list[int]:
    """The ids that end the model's answers, as its files name them."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(found)
