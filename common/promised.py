"""What each class was promised of late, of one kind of target: so that work of a lower class leaves time for it. Pure.

Who is promised much comes unannounced, and waits for the step that runs to end. So that step is to be short already
before somebody comes: a worker takes it that whoever came within the last GUESTS_FOR_S comes again.
"""

from __future__ import annotations

GUESTS_FOR_S = 60.0
MOST_GUESTS = 64


class Promised:
    def __init__(self) -> None:
        self._last: dict[tuple[int, float | None], float] = {}
        """Class and target → last asked for, oldest first."""

    def asked(self, number: int, target_s: float | None, now: float) -> None:
        """One of class `number` came, with a target or without."""
        guest = (number, target_s)
        self._last.pop(guest, None)
        self._last[guest] = now
        if len(self._last) > MOST_GUESTS:
            del self._last[next(iter(self._last))]

    def above(self, number: int, now: float) -> float | None:
        """The tightest target of the classes above `number`, None where nobody with one came of late."""
        if not self._last:
            return None
        return min((one for one in self.all_above(number, now) if one is not None), default=None)

    def all_above(self, number: int, now: float) -> list[float | None]:
        """Targets of the classes above `number` of which somebody came of late; None: without one."""
        return [
            target_s
            for (other, target_s), at in self._last.items()
            if other < number and now - at <= GUESTS_FOR_S
        ]
