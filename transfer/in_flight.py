"""Frames on their way to each peer: sent, and neither credited nor asked for again. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from common.request import Key, WorkerId

WINDOW_BYTES = 16 << 20
"""To one peer. With blocks of 369 kB three messages: while one is copied another is packed, and one lies between."""


class InFlight:
    def __init__(self) -> None:
        self._by_peer: dict[WorkerId, dict[Key, set[int]]] = {}
        self._counts: dict[WorkerId, int] = {}

    def __len__(self) -> int:
        return sum(self._counts.values())

    def count(self, peer: WorkerId) -> int:
        return self._counts.get(peer, 0)

    def add(self, peer: WorkerId, key: Key, indices: Iterable[int]) -> None:
        frames = self._by_peer.setdefault(peer, {}).setdefault(key, set())
        before = len(frames)
        frames.update(indices)
        self._counts[peer] = self._counts.get(peer, 0) + len(frames) - before

    def arrived(self, peer: WorkerId, key: Key, indices: Iterable[int]) -> None:
        """Those of `indices` that are under way are no longer."""
        frames = self._by_peer.get(peer, {}).get(key, set())
        self._take(peer, key, frames.intersection(indices))

    def forget(self, peer: WorkerId, key: Key) -> None:
        """Nothing of this transfer counts any more."""
        self._take(peer, key, set(self._by_peer.get(peer, {}).get(key, ())))

    def _take(self, peer: WorkerId, key: Key, indices: set[int]) -> None:
        if not indices:
            return
        transfers = self._by_peer[peer]
        transfers[key] -= indices
        self._counts[peer] -= len(indices)
        if not transfers[key]:
            del transfers[key]
        if not transfers:
            del self._by_peer[peer], self._counts[peer]
