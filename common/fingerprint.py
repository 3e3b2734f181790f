"""What two processes must agree on before KV may pass between them. Pure.

A flat map of named facts (protocol major, weights revision, dtype, block layout, heads, rope, tokenizer …);
compared at registration, and by digest in every offer. A difference is reported as field, ours, theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

Value = str | int | float | bool | None
Fingerprint = Mapping[str, Value]


def first_difference(ours: Fingerprint, theirs: Fingerprint) -> tuple[str, Value, Value] | None:
    """The first field, by name, that differs, with both values; a missing field counts as None."""
    for name in sorted(set(ours) | set(theirs)):
        if ours.get(name) != theirs.get(name):
            return name, ours.get(name), theirs.get(name)
    return None


def digest(fingerprint: Fingerprint) -> str:
    text = "\n".join(f"{name}={fingerprint[name]!r}" for name in sorted(fingerprint))
    return blake2b(text.encode(), digest_size=16).hexdigest()
