"""Tools, calls and their answers as plain messages, for chat templates that have no place for them. Pure.

In the way of the Hermes models, which many models have seen: functions as lines of JSON in the system message, a
call as JSON between `<tool_call>` marks, what it gave between `<tool_response>` marks in the user's place. So tools
work with any model, as well as it can follow what it is told.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Messages = list[dict[str, Any]]

_BEFORE = """\
You may call functions to help with what the user asks. The functions, one JSON object per line between <tools> and \
</tools>:
<tools>
"""
_AFTER = """
</tools>
To call a function, answer with a JSON object of its name and its arguments between <tool_call> and </tool_call>:
<tool_call>
{"name": <function name>, "arguments": <object of arguments>}
</tool_call>"""


def as_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], system_role: bool
) -> Messages:
    """The same conversation without tools in it. Where there is no `system_role`, the user says what it would."""
    plain: Messages = []
    before = ""
    for message in messages:
        if message["role"] != "tool":
            plain.append(_with_calls(message))
        elif before != "tool":
            plain.append({"role": "user", "content": _response(message)})
        else:  # what several calls gave stands in one message: many templates want user and assistant in turn
            plain[-1]["content"] += "\n" + _response(message)
        before = message["role"]
    return _with_tools(plain, tools, "system" if system_role else "user") if tools else plain


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls", ())
    if not calls:
        return message
    parts = [message["content"]] if message["content"] else []
    parts += [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls
    ]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return kept | {"content": "\n".join(parts)}


def _response(message: dict[str, Any]) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _with_tools(plain: Messages, tools: Sequence[dict[str, Any]], role: str) -> Messages:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = _BEFORE + lines + _AFTER
    if plain and plain[0]["role"] == role:
        between = [plain[0]["content"], told] if role == "system" else [told, plain[0]["content"]]
        return [plain[0] | {"content": "\n\n".join(text for text in between if text)}, *plain[1:]]
    return [{"role": role, "content": told}, *plain]
