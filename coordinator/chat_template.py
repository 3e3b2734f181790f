"""Chat messages to the text that the model was trained on, by the model's own template.

Why a sandbox: a template comes with a model from elsewhere, and it is a program. It gets the names and the
filters that templates on the hub rely on, and no attribute of ours.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import BadRequest, ModelCannotBeLoaded

log = logging.getLogger("kvferry.http")


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here its inside is plain text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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


class ChatTemplate:
    """One compiled template. `special_tokens` are the names it may use: `bos_token`, `eos_token` …"""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelCannotBeLoaded(f"the chat template does not compile: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt up to where the assistant's answer begins. Raises BadRequest with the template's reason."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except _Refused as refusal:
            raise BadRequest(
                f"The model's chat template refuses these messages: {refusal.message}",
                param="messages",
                code="chat_template_refused",
            ) from refusal
        except Exception as error:
            # A template is a program, and may fail with whatever Python raises.
            log.warning("the chat template failed with %s: %s", type(error).__name__, error)
            raise BadRequest(
                "The model's chat template cannot render these messages.",
                param="messages",
                code="chat_template_failed",
            ) from error


def find_template(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The template's source: `chat_template.jinja`, or the entry of `tokenizer_config.json`, which is a string
    or a list of named ones."""
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    entry = tokenizer_config.get("chat_template")
    if isinstance(entry, list):
        entry = {named.get("name"): named.get("template") for named in entry}.get("default")
    return entry if isinstance(entry, str) else None
