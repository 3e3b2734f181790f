"""Which prompt beginnings each worker should still have in its cache, by what was computed there. Pure.

A guess, to weigh routes by: the workers themselves find out what they have. Kept in pieces of PIECE_TOKENS, by hashes
that chain over what stands before, the last used ones of each worker, as many as its pool holds. A worker that begins
anew has nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import xxhash

from common.request import Incarnation, Request, WorkerId, pack_ids
from coordinator.registry import Worker

PIECE_TOKENS = 64
MOST_PIECES = 128
"""Of one prompt: what comes after them decides no route."""
MOST_WORKERS = 4096
_PIECE_BYTES = 4 * PIECE_TOKENS

Chain = tuple[int, ...]


def chain_of(request: Request, outputs: Sequence[int] = ()) -> Chain:
    """Of the prompt, and `outputs` behind it."""
    ids = request.prompt_ids + pack_ids(outputs) if outputs else request.prompt_ids
    parent = xxhash.xxh3_64_intdigest(request.cache_salt.encode())
    chain = []
    for start in range(0, min(len(ids) // _PIECE_BYTES, MOST_PIECES) * _PIECE_BYTES, _PIECE_BYTES):
        parent = xxhash.xxh3_64_intdigest(ids[start : start + _PIECE_BYTES], parent)
        chain.append(parent)
    return tuple(chain)


class Prefixes:
    def __init__(self) -> None:
        # Of each worker, the life that it is of, and hashes by last use.
        self._of: OrderedDict[WorkerId, tuple[Incarnation, OrderedDict[int, None]]] = OrderedDict()

    def hits(self, worker: Worker, chain: Chain) -> int:
        """Tokens of it that the worker should find."""
        known = self._of.get(worker.id)
        if known is None or known[0] != worker.incarnation:
            return 0
        count = 0
        for piece in chain:
            if piece not in known[1]:
                break
            count += 1
        return count * PIECE_TOKENS

    def computed(self, worker: Worker, chain: Chain) -> None:
        """The worker has had all of it."""
        known = self._of.get(worker.id)
        if known is None or known[0] != worker.incarnation:
            known = self._of[worker.id] = (worker.incarnation, OrderedDict())
            if len(self._of) > MOST_WORKERS:
                self._of.popitem(last=False)
        held = known[1]
        for piece in reversed(chain):  # the beginning is the last to be forgotten
            held[piece] = None
            held.move_to_end(piece)
        while len(held) > worker.capacity_tokens // PIECE_TOKENS:
            held.popitem(last=False)
