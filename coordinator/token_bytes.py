"""Which bytes a token stands for, read off the decoder section of a `tokenizer.json`. Pure.

With bytes per token, text is the UTF-8 decoding of a concatenation: exact, one token at a time, no window of
earlier tokens to decode again. It holds for the two kinds of tokenizer that the model families served here use;
any other decoder is refused by name rather than approximated.

The first token keeps its leading space (SentencePiece's own decoder drops it): an answer continues its prompt,
so text(prompt) + text(answer) = text(prompt + answer).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"

ToBytes = Callable[[str], bytes]


class UnknownDecoder(ValueError):
    """A decoder whose token bytes we cannot tell."""


def bytes_rule(decoder: dict[str, Any] | None) -> ToBytes:
    """Token string → bytes. Raises UnknownDecoder."""
    steps = [] if decoder is None else _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level
    if kinds == ["Metaspace"] and steps[0].get("replacement", _SPACE_MARK) == _SPACE_MARK:
        return space_marked
    sentencepiece = [kind for kind in kinds if kind not in ("Fuse", "Strip")]
    if sentencepiece == ["Replace", "ByteFallback"] and _marks_space(steps[0]):
        return byte_fallback
    raise UnknownDecoder(f"tokenizer.json has decoder {kinds}, which kvferry does not know")


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]


def _marks_space(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": _SPACE_MARK} and step.get("content") == " "


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: a byte that is a visible Latin-1 character stands for itself, the others,
    in order, are moved to U+0100 and up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in visible}
    moved = (byte for byte in range(256) if byte not in set(visible))
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(moved)}


_ALPHABET = _byte_level_alphabet()


def byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token that is kept as plain text
        return token.encode("utf-8", "replace")


def space_marked(token: str) -> bytes:
    return token.replace(_SPACE_MARK, " ").encode("utf-8", "replace")


def byte_fallback(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else space_marked(token)
