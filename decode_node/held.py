"""Who is here, by what each of them waits for. Pure. Decides nothing: `scheduler.py` moves them.

reserved   its blocks, which a prefill worker sends
ready      a slot of the batch; its KV is whole
waiting    slot and blocks, to be computed here from its first token on
preempted  the same, put out
prefilling, decoding   nothing: these run
"""

from __future__ import annotations

from contextlib import suppress

from common.lifecycle import Phase
from common.request import Key
from common.sequence import Sequence


class Held:
    def __init__(self) -> None:
        self.seqs: dict[Key, Sequence] = {}  # all of them
        self.reserved: dict[Key, Sequence] = {}  # accepted transfers, in order of acceptance
        self.ready: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self._place = {
            Phase.DECODE_READY: self.ready,
            Phase.QUEUED: self.waiting,
            Phase.PREEMPTED: self.preempted,
            Phase.PREFILLING: self.prefilling,
            Phase.DECODING: self.decoding,
        }

    def __len__(self) -> int:
        return len(self.seqs)

    def __contains__(self, key: Key) -> bool:
        """Whether anything is held for `key`, a transfer under way included."""
        return key in self.seqs

    def get(self, key: Key) -> Sequence | None:
        """A sequence this worker owns: not one whose transfer is still under way."""
        return None if key in self.reserved else self.seqs.get(key)

    def keys(self) -> list[Key]:
        return list(self.seqs)

    def older_attempts(self, key: Key) -> list[Key]:
        """Keys of the same request with a lower attempt."""
        return [other for other in self.seqs if other[0] == key[0] and other[1] < key[1]]

    def sequences(self) -> list[Sequence]:
        return list(self.seqs.values())

    def with_blocks(self) -> list[Sequence]:
        """Those that hold blocks, transfers under way left out."""
        return [*self.decoding, *self.prefilling, *self.ready]

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def num_waiting(self) -> int:
        return len(self.seqs) - self.num_running

    @property
    def num_local_waiting(self) -> int:
        return len(self.waiting)

    @property
    def queued_tokens(self) -> int:
        """Tokens that this worker has to prefill itself."""
        return sum(seq.left for seq in (*self.waiting, *self.preempted, *self.prefilling))

    def take_out(self, seq: Sequence) -> None:
        """Out of where it stands by its phase: nowhere, where we erred as it was being moved, and a transfer under way
        in `reserved` alone."""
        with suppress(ValueError):
            self._place.get(seq.life.phase, []).remove(seq)
