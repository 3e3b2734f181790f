"""Finds stop strings in text that arrives in pieces. Pure.

Text is read one character at a time, each stop string by its own Knuth-Morris-Pratt automaton. Its state, how
many characters of the stop the text now ends with, is at once the match and what must be held back: the longest
end of the text that could still become a stop. The work is constant for each character, and how the text was cut
into pieces changes nothing.

The stop that is complete first wins; of those complete at the same character, the one that began first.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._tables = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)

    @property
    def held_chars(self) -> int:
        """How many characters at the end of the text so far could begin a stop."""
        return max(self._matched, default=0)

    def feed(self, text: str, armed: bool) -> tuple[int, int] | None:
        """Reads on. Returns the first match as (characters of `text` up to its end, its length), after which the
        search is over. Not armed, a complete stop is passed over as plain text."""
        for index, char in enumerate(text):
            longest = self._step(char)
            if longest and armed:
                return index + 1, longest
        return None

    def _step(self, char: str) -> int:
        """Length of the longest stop that this character completes, or 0."""
        longest = 0
        for which, stop in enumerate(self._stops):
            borders = self._tables[which]
            count = self._matched[which]
            while count and stop[count] != char:
                count = borders[count - 1]
            if stop[count] == char:
                count += 1
            if count == len(stop):
                longest = max(longest, count)
                count = borders[count - 1]
            self._matched[which] = count
        return longest


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its end."""
    borders = [0] * len(stop)
    count = 0
    for index in range(1, len(stop)):
        while count and stop[index] != stop[count]:
            count = borders[count - 1]
        if stop[index] == stop[count]:
            count += 1
        borders[index] = count
    return borders
