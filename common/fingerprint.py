"""What two processes must agree on before KV may pass between them. Pure.

A flat map of named facts (protocol major, weights revision, dtype, block layout, heads, rope, tokenizer …);
compared at registration, and by digest in every offer. A difference is reported as field, ours, theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

Value = str | int | float | bool | None
Fingerprint = Mapping[str, Value]


# What a person chose first, what follows from it last: another dtype makes other block bytes and linear kernels too.
_CAUSES = ("protocol", "architecture", "weights_revision", "dtype", "block_size", "device_kind")
_CONSEQUENCES = ("attention_backend", "linear_policy", "kv_dtype", "kv_layout", "block_bytes")


def first_difference(ours: Fingerprint, theirs: Fingerprint) -> tuple[str, Value, Value] | None:
    """The most telling field that differs, with both values; a missing field counts as None."""
    for name in sorted(set(ours) | set(theirs), key=_telling):
        if ours.get(name) != theirs.get(name):
            return name, ours.get(name), theirs.get(name)
    return None


def _telling(name: str) -> tuple[int, str]:
    """Sorts causes in their order, then other facts by name, then consequences in theirs."""
    if name in _CAUSES:
        return _CAUSES.index(name), ""
    if name in _CONSEQUENCES:
        return len(_CAUSES) + 1 + _CONSEQUENCES.index(name), ""
    return len(_CAUSES), name


def digest(fingerprint: Fingerprint) -> str:
    text = "\n".join(f"{name}={fingerprint[name]!r}" for name in sorted(fingerprint))
    return blake2b(text.encode(), digest_size=16).hexdigest()
