"""How the answers of one request may call tools: who reads them, and how they are shown. Pure.

Rules that clients rely on:
- Content and calls are read off the same text whether it is streamed or not, so joined deltas are the whole answer.
- `logprobs.content` lists every token of the answer, those that write calls among them: their texts joined are what
  the model wrote. In a stream a token comes with the first chunk after its text.
- An answer that ended by itself and has calls ended for "tool_calls", unless the call was asked for by name: then
  the caller knew, and it is "stop", as OpenAI has it. One that was cut is "length" and shows what there is.
- With `parallel_tool_calls` false, what comes after the first call is left out.
- A forced answer is calls and their wrapping, and nothing of it is content: not even where it was cut in a wrapping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.request import Grammar
from coordinator.openai.tools import NamedChoice, ToolFields, ToolMode
from coordinator.tools.calls import Arguments, CallBegun, Content, ToolCallParser, ToolEvent
from coordinator.tools.families import Family


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`functions` are those that may be called, with the schemas of their parameters."""

    family: Family
    functions: Mapping[str, dict[str, Any] | None]
    parallel: bool
    forced: bool
    named: bool

    def parser(self) -> ToolCallParser:
        return ToolCallParser(self.family.rule, self.functions, single=self.named or not self.parallel)

    def grammar(self) -> Grammar | None:
        """What makes sure of a call."""
        return self.family.forced(self.functions, self.parallel and not self.named) if self.forced else None

    @property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens that the parser must see."""
        return frozenset(self.family.marker_ids.values())

    def finish(self, finish: str, calls: int) -> str:
        return "tool_calls" if calls and finish == "stop" and not self.named else finish


def tool_use(
    family: Family, tools: Sequence[ToolFields], choice: ToolMode | NamedChoice | None, parallel: bool
) -> ToolUse | None:
    """None where no tool may be called."""
    if not tools or choice == "none":
        return None
    functions = {tool.function.name: tool.function.parameters for tool in tools}
    named = isinstance(choice, NamedChoice)
    if isinstance(choice, NamedChoice):
        functions = {choice.function.name: functions[choice.function.name]}
    return ToolUse(family, functions, parallel, forced=named or choice == "required", named=named)


class CallShapes:
    """One choice's calls in OpenAI's shapes."""

    def __init__(self, use: ToolUse, request_id: str, choice: int) -> None:
        self._use = use
        self._ids = request_id, choice
        self._parser = use.parser()

    def deltas(self, text: str, finish: str | None) -> list[dict[str, Any]]:
        """The deltas that this text brings, none of them empty; all that is left, where it is the last."""
        return [self._delta(event) for event in self._events(text, last=finish is not None)]

    def finish(self, finish: str) -> str:
        return self._use.finish(finish, self._parser.calls)

    def message(self, text: str) -> dict[str, Any]:
        """`content` of a whole answer, null where there is none but calls, and its `tools/calls` if any."""
        content = ""
        calls: list[dict[str, Any]] = []
        for event in self._events(text, last=True):
            match event:
                case Content(more):
                    content += more
                case CallBegun(index, name):
                    calls.append(self._call(index, name))
                case Arguments(index, more):
                    calls[index]["function"]["arguments"] += more
        if not calls:
            return {"content": content, "refusal": None}
        return {"content": content or None, "refusal": None, "tool_calls": calls}

    def _events(self, text: str, last: bool) -> list[ToolEvent]:
        events = self._parser.push(text)
        if last:
            events += self._parser.end()
        return [event for event in events if not (self._use.forced and isinstance(event, Content))]

    def _delta(self, event: ToolEvent) -> dict[str, Any]:
        match event:
            case Content(text):
                return {"content": text}
            case CallBegun(index, name):
                return {"tool_calls": [{"index": index, **self._call(index, name)}]}
            case Arguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _call(self, index: int, name: str) -> dict[str, Any]:
        id = self._use.family.call_id(*self._ids, index)
        return {"id": id, "type": "function", "function": {"name": name, "arguments": ""}}
