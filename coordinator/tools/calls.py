"""Finds tool calls in an answer's text as it grows: text in, content and calls out. Pure.

A call is told as soon as it cannot be anything else: its marker, if the family has one, the name of a tool that was
offered, and the brace that opens its arguments. From there on its arguments are told as they come, up to the brace
that closes them, whatever is between. What turns out not to be a call is content, to the letter; white space before
the first call, between calls and after the last belongs to none of the two.

Why generators: a rule reads as it would over the whole text, one character at a time, and stops where the text so
far ends. So how the text was cut into pieces cannot change what comes out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, str, T]
"""Waits for one character at each yield, an empty one after the last."""

MAX_NAME_CHARS = 64
_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS_WITHOUT_EFFECT = ("type", "id")


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Call number `index` of this answer is a call of the tool `name`."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of call number `index`, as the model writes them: JSON, if it does not err."""

    index: int
    text: str


ToolEvent = Content | CallBegun | Arguments


@dataclass(slots=True)
class _Members:
    """What was read of a call's object. `arguments` are those that came before the name."""

    name: str = ""
    arguments: str = ""
    begun: bool = False
    keys: list[str] = field(default_factory=list)


class Reader:
    """The place in the text, and what a rule makes of it. `names` are the tools that may be called.

    `char` is looked at and not read yet; it is empty at the end. What is read is held until the rule says what it is.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.char = ""
        self.calls = 0
        self.between_calls = True
        self.complete_calls = 0
        self._names = frozenset(names)
        self._held: list[str] = []
        # (index of the call or -1 for content, text, whether the text is the name of a call that begins)
        self._told: list[tuple[int, str, bool]] = []

    def take(self) -> list[ToolEvent]:
        """What was told since the last time, in as few events as can be."""
        told, self._told = self._told, []
        events: list[ToolEvent] = []
        for (index, _, begins), pieces in groupby(told, lambda piece: (piece[0], "", piece[2])):
            text = "".join(text for _, text, _ in pieces)
            if begins:
                events.append(CallBegun(index, text))
            else:
                events.append(Content(text) if index < 0 else Arguments(index, text))
        return events

    # ------------------------------------------------------------ what was read, told

    def pass_over(self) -> None:
        """What is held is the wrapping of a call."""
        self._held.clear()
        self.between_calls = True

    def give_up(self) -> None:
        """What is held is content after all."""
        held = "".join(self._held)
        self._held.clear()
        if held and not (self.calls and self.between_calls and not self.char and held.isspace()):
            self._told.append((-1, held, False))
            self.between_calls = False

    def content(self, until: str = "") -> Reading[None]:
        """What is held is content; where nothing is, what comes is, up to the next `until`."""
        if self._held:
            self.give_up()
            return
        while self.char:
            self._told.append((-1, self.char, False))
            self.between_calls = False
            self.char = yield
            if self.char == until:
                return

    def _begin(self, name: str) -> None:
        self._told.append((self.calls, name, True))
        self.calls += 1
        self._held.clear()

    def _complete(self) -> None:
        self.complete_calls += 1
        self.pass_over()

    def _argue(self, text: str) -> None:
        self._told.append((self.calls - 1, text, False))

    # ------------------------------------------------------------ reading

    def read(self) -> Reading[None]:
        self._held.append(self.char)
        self.char = yield

    def spaces(self) -> Reading[None]:
        while self.char and self.char in " \t\r\n":
            yield from self.read()

    def word(self, *words: str) -> Reading[str]:
        """Reads on while it may become one of `words`; the one that it is, or an empty one."""
        seen = ""
        while self.char and any(word.startswith(seen + self.char) for word in words):
            seen += self.char
            yield from self.read()
            if seen in words:
                return seen
        return ""

    def name(self) -> Reading[str]:
        """A bare name, and empty where it is none."""
        seen = ""
        while self.char and (self.char.isalnum() or self.char in "_-") and len(seen) <= MAX_NAME_CHARS:
            seen += self.char
            yield from self.read()
        return seen

    def named_call(self, name: str) -> Reading[bool]:
        """The arguments of a call whose name was read before them."""
        if name not in self._names or self.char != "{":
            return False
        self._begin(name)
        if not (yield from self._braces(self._argue)):
            return False
        self._complete()
        return True

    def call(self) -> Reading[bool]:
        """An object of a name and arguments, in either order. False where it is none: what is held then is content;
        if the call had begun, it stands with what there is of it."""
        if self.char != "{":
            return False
        found = _Members()
        more = True
        while more:
            yield from self.read()
            if not (yield from self._member(found)):
                return False
            yield from self.spaces()
            more = self.char == ","
        if self.char != "}" or not found.name:
            return False
        if not found.begun:
            self._begin(found.name)
            self._argue("{}")
        yield from self.read()
        self._complete()
        return True

    def _member(self, found: _Members) -> Reading[bool]:
        """One key and its value, or False where no call has such."""
        key = yield from self._key()
        if not key or key in found.keys:
            return False
        found.keys.append(key)
        if key == "name":
            found.name = yield from self._string()
            if found.name not in self._names:
                return False
            if found.arguments:
                self._begin(found.name)
                self._argue(found.arguments)
                found.begun = True
            return True
        if key in _KEYS_WITHOUT_EFFECT:
            return bool((yield from self._string()))
        if self.char != "{":
            return False
        if found.name:
            self._begin(found.name)
            found.begun = True
            return (yield from self._braces(self._argue))
        before = len(self._held)
        whole = yield from self._braces(self._held.append)
        found.arguments = "".join(self._held[before:])
        return whole

    def _key(self) -> Reading[str]:
        """The next key and its colon, or nothing where it is not one that a call may have."""
        yield from self.spaces()
        key = yield from self._string()
        if key not in ("name", *_ARGUMENT_KEYS, *_KEYS_WITHOUT_EFFECT):
            return ""
        yield from self.spaces()
        if self.char != ":":
            return ""
        yield from self.read()
        yield from self.spaces()
        return "arguments" if key in _ARGUMENT_KEYS else key

    def _string(self) -> Reading[str]:
        """A JSON string's value, or nothing where there is none."""
        if self.char != '"':
            return ""
        before, escaped = len(self._held), False
        yield from self.read()
        while self.char and (escaped or self.char != '"'):
            escaped = self.char == "\\" and not escaped
            yield from self.read()
        if not self.char:
            return ""
        yield from self.read()
        try:
            return str(json.loads("".join(self._held[before:])))
        except ValueError:
            return ""

    def _braces(self, told: Callable[[str], None]) -> Reading[bool]:
        """From an opening brace to the one that closes it; False if the text ends before."""
        depth, quoted, escaped = 0, False, False
        while self.char:
            char = self.char
            told(char)
            if quoted:
                quoted = escaped or char != '"'
                escaped = char == "\\" and not escaped
            else:
                quoted = char == '"'
                depth += (char in "{[") - (char in "}]")
            self.char = yield
            if depth == 0:
                return True
        return False


# --- the families ------------------------------------------------------------------------------------------

Rule = Callable[[Reader], Reading[None]]


def hermes(r: Reader) -> Reading[None]:
    """Hermes, Qwen: `<tool_call>{"name": …, "arguments": …}</tool_call>`, any number, with text before and between."""
    while r.char:
        if r.between_calls:
            yield from r.spaces()
        if (yield from r.word("<tool_call>")):
            yield from r.spaces()
            if (yield from r.call()):
                yield from r.spaces()
                if (yield from r.word("</tool_call>")):
                    r.pass_over()
                    continue
                if not r.char:
                    r.pass_over()
        yield from r.content(until="<")


def llama3_json(r: Reader) -> Reading[None]:
    """Llama 3: the whole answer is `{"name": …, "parameters": …}`, or several with `;` between, after an optional
    `<|python_tag|>`."""
    yield from r.spaces()
    if (yield from r.word("<|python_tag|>")):
        yield from r.spaces()
    while (yield from r.call()):
        yield from r.spaces()
        if not (yield from r.word(";")):
            break
        yield from r.spaces()
    r.give_up()
    while r.char:
        yield from r.content()


def mistral(r: Reader) -> Reading[None]:
    """Mistral: `[TOOL_CALLS][{"name": …, "arguments": …}, …]`, and its later form `[TOOL_CALLS]name[ARGS]{…}`, where
    `[ARGS]` may be missing and `[CALL_ID]…` may stand before it."""
    while r.char:
        if r.between_calls:
            yield from r.spaces()
        if (yield from r.word("[TOOL_CALLS]")):
            yield from r.spaces()
            if r.char == "[":
                found = yield from _mistral_list(r)
            elif r.char == "{":
                found = yield from r.call()
            else:
                found = yield from _mistral_named(r)
            if found:
                continue
        yield from r.content(until="[")


def _mistral_list(r: Reader) -> Reading[bool]:
    yield from r.read()
    yield from r.spaces()
    while (yield from r.call()):
        yield from r.spaces()
        mark = yield from r.word(",", "]")
        r.pass_over()
        if mark != ",":
            return mark == "]"
        yield from r.spaces()
    return False


def _mistral_named(r: Reader) -> Reading[bool]:
    name = yield from r.name()
    mark = yield from r.word("[CALL_ID]", "[ARGS]")
    if mark == "[CALL_ID]":
        yield from r.name()
        yield from r.word("[ARGS]")
    yield from r.spaces()
    return (yield from r.named_call(name))


class ToolCallParser:
    """One answer's state. `push` text as it comes, `end` once after the last. With `single`, what comes after the
    first call is left out."""

    def __init__(self, rule: Rule, names: Iterable[str], single: bool = False) -> None:
        self._reader = Reader(names)
        self._single = single
        self._reading = self._read(rule)
        next(self._reading)

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return self._reader.calls

    def push(self, text: str) -> list[ToolEvent]:
        for char in text:
            if self._is_over():
                break
            self._reading.send(char)
        return self._reader.take()

    def end(self) -> list[ToolEvent]:
        if not self._is_over():
            self._reading.send("")
        return self._reader.take()

    def _is_over(self) -> bool:
        return self._single and self._reader.complete_calls > 0

    def _read(self, rule: Rule) -> Reading[None]:
        reader = self._reader
        reader.char = yield
        if reader.char:
            yield from rule(reader)
        reader.give_up()
        yield
