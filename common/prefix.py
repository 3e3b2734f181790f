"""Prefix hashes: a chain over blocks, equal in every process, that names the KV content of a block. Pure.

blake2b-128 over (parent hash, the block's token ids); the first parent is the seed, a hash of everything else
that shapes KV: fingerprint, adapter, and the salt that isolates a tenant or a request. Python's own `hash()` is
salted per process and would make two workers never agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from common.request import pack_ids

HASH_BYTES = 16
_VERSION = b"kvferry-prefix-1"


def seed_hash(
    fingerprint: str, salt: str = "", tenant: str = "", adapter: str = "", family: str = ""
) -> bytes:
    """Parent of a prompt's first block. `family` names one request's choices, where only they may share."""
    digest = blake2b(_VERSION, digest_size=HASH_BYTES)
    for part in (fingerprint, salt, tenant, adapter, *([family] if family else ())):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def extend_chain(chain: list[bytes], seed: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Appends the hashes of the complete blocks of `tokens` that `chain` does not hold yet."""
    first = len(chain)
    count = len(tokens) // block_size - first
    if count <= 0:
        return
    parent = chain[-1] if chain else seed
    size = 4 * block_size
    packed = pack_ids(tokens[first * block_size : (first + count) * block_size])
    for at in range(0, count * size, size):
        parent = blake2b(parent + packed[at : at + size], digest_size=HASH_BYTES).digest()
        chain.append(parent)


def join_hashes(chain: Sequence[bytes]) -> bytes:
    return b"".join(chain)


def split_hashes(joined: bytes) -> list[bytes]:
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined) - HASH_BYTES + 1, HASH_BYTES)]
