"""Chat messages to the text that the model was trained on, by the model's own template.

Why a sandbox: a template comes with a model from elsewhere, and it is a program, to which a client gives values. It
gets the names and the filters that templates on the hub rely on, and no attribute of ours. Its steps, its texts and
what it writes are counted, so one that does not end, or grows, is refused like any other that fails. What cannot be
counted is a loop that looks nothing up and calls nothing: jinja bounds each `range`, and the operator chose the
template.
"""

from __future__ import annotations

import json
import logging
import threading
import traceback
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import BadRequest, ModelCannotBeLoaded
from coordinator.openai.messages import Chat
from coordinator.tools.as_text import as_text

log = logging.getLogger("kvferry.http")

MAX_STEPS = 1_000_000
QUICK_STEPS = 20_000
"""As many as may be taken where others wait: some milliseconds."""
MAX_TEXT_CHARS = 8 << 20


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class TookTooLong(jinja2.TemplateError):
    """The template took more steps, or made more text, than it may."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here its inside is plain text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CountedEnvironment(ImmutableSandboxedEnvironment):
    """Every look-up, call, operation and piece of output is a step, and no text in it may be longer than
    MAX_TEXT_CHARS."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self._taken = threading.local()

    def start(self, max_steps: int) -> None:
        """A rendering of this thread begins."""
        self._taken.steps, self._taken.most = 0, max_steps

    def step(self, value: Any) -> Any:
        # While a template is compiled, constants are worked out by no thread's count.
        steps = self._taken.steps = getattr(self._taken, "steps", 0) + 1
        if steps > getattr(self._taken, "most", MAX_STEPS) or (
            isinstance(value, (str, list, tuple)) and len(value) > MAX_TEXT_CHARS
        ):
            raise TookTooLong
        return value

    def getattr(self, obj: Any, attribute: str) -> Any:
        return self.step(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return self.step(super().getitem(obj, argument))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.step(None)
        return self.step(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """What would be large is refused before it is made."""
        self.step(None)
        for one, other in ((left, right), (right, left)):
            if operator == "*" and isinstance(one, int) and isinstance(other, (str, list, tuple)):
                self._check_size(one * len(other))
        if operator == "**" and isinstance(right, int):
            self._check_size(right)
        if operator == "%" and isinstance(left, str) and "*" in left:
            raise TookTooLong
        return self.step(super().call_binop(context, operator, left, right))

    def _check_size(self, size: int) -> None:
        if size > MAX_TEXT_CHARS:
            raise TookTooLong


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _failed(error: Exception) -> BadRequest:
    # Its words may quote a message, which is for no log: its kind and the template's line have to do.
    log.warning("the chat template failed with %s in line %s", type(error).__name__, _line_of(error))
    return BadRequest(
        "The model's chat template cannot render these messages.",
        param="messages",
        code="chat_template_failed",
    )


def _line_of(error: Exception) -> int | str:
    """The template's line that raised."""
    lines = [
        number
        for frame, number in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == "<template>"
    ]
    return lines[-1] if lines else "?"


class ChatTemplate:
    """One compiled template, and another for chats with tools where a model has two. `special_tokens` are the names it
    may use: `bos_token`, `eos_token` …

    `has_place_for_tools`: whether what it writes depends on the tools. Where it does not, tools, calls and their
    answers are told as text.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        self._environment = _CountedEnvironment()
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = _strftime_now
        self.sources = source if tool_source is None else source + tool_source
        self._special_tokens = dict(special_tokens)
        self._template = self._compiled(source)
        self._tool_template = self._template if tool_source is None else self._compiled(tool_source)
        self.has_place_for_tools = self._shows_tools()
        self._has_system_role = self._renders({"role": "system", "content": "x"}, _USER)

    def render(self, chat: Chat, quick: bool = False) -> str:
        """The prompt up to where the assistant's answer begins. Raises BadRequest with the template's reason, and
        TookTooLong where it would take more than QUICK_STEPS and was to be `quick`."""
        self._environment.start(QUICK_STEPS if quick else MAX_STEPS)
        try:
            text = self._render(chat)
        except TookTooLong as error:
            if quick:
                raise
            raise _failed(error) from error
        except _Refused as refusal:
            raise BadRequest(
                f"The model's chat template refuses these messages: {refusal.message}",
                param="messages",
                code="chat_template_refused",
            ) from refusal
        except Exception as error:
            # A template is a program, and may fail with whatever Python raises.
            raise _failed(error) from error
        return _up_to_content(text, chat.messages[-1]["content"]) if chat.continue_final_message else text

    def _compiled(self, source: str) -> jinja2.Template:
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelCannotBeLoaded(
                f"the chat template does not compile: {error.message} (line {error.lineno})"
            ) from error

    def _render(self, chat: Chat) -> str:
        messages, tools = list(chat.messages), list(chat.tools)
        if not self.has_place_for_tools:
            messages, tools = as_text(messages, tools, self._has_system_role), []
        return self._written(messages, tools, chat)

    def _written(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], chat: Chat) -> str:
        template = self._tool_template if tools else self._template
        pieces: list[str] = []
        size = 0
        for piece in template.generate(
            **chat.kwargs,
            **self._special_tokens,
            messages=messages,
            tools=tools or None,
            documents=None,
            add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
        ):
            pieces.append(self._environment.step(piece))
            size += len(piece)
            if size > MAX_TEXT_CHARS:
                raise TookTooLong
        return "".join(pieces)

    def _shows_tools(self) -> bool:
        function = {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object", "properties": {}}}
        tool = {"type": "function", "function": function}
        try:
            return _PROBE in self._written([_USER], [tool], Chat([_USER]))
        except Exception:  # such a template cannot be given tools
            return False

    def _renders(self, *messages: dict[str, Any]) -> bool:
        try:
            self._written(list(messages), [], Chat(messages))
        except Exception:
            return False
        return True


_PROBE = "kvferry_probe"
_USER = {"role": "user", "content": "x"}


def _up_to_content(text: str, content: str) -> str:
    """The rendered text up to where the last message's content ends, so that the answer goes on with it."""
    bare = content.strip()
    begin = text.rfind(bare)
    if begin < 0:
        raise BadRequest(
            "continue_final_message: the model's chat template does not show the last message as it is.",
            param="continue_final_message",
            code="chat_template_failed",
        )
    end = begin + len(bare)
    blank = content[len(content.rstrip()) :]
    return text[: end + len(blank)] if text.startswith(blank, end) else text[:end]


def find_templates(model_dir: Path, settings: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The template's source, and the one for chats with tools where it is another: `chat_template.jinja`, or the entry
    of `tokenizer_config.json`, which is a string or a list of named ones."""
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8"), None
    entry = settings.get("chat_template")
    if isinstance(entry, list):
        named = {one.get("name"): one.get("template") for one in entry}
        return named.get("default"), named.get("tool_use")
    return (entry if isinstance(entry, str) else None), None
