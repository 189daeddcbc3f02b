"""Sums over a window of time, in bounded memory."""

from __future__ import annotations

from bisect import bisect_right
from math import inf

_MOST = 64
"""Groups, before neighbours are merged."""


class WindowSums(list[tuple[float, int, float]]):
    """Numbers with times, in groups of (time of the first one, how many, their sum), the earliest first.

    Each number has a group of its own until there are more than 64 groups; then neighbours are merged in
    pairs. So no call takes longer for the many numbers that came, and few numbers are remembered exactly.
    """

    __slots__ = ()

    def add(self, at: float, value: float = 0.0) -> None:
        """Add a number; times never go back."""
        self.append((at, 1, value))
        if len(self) > _MOST:
            pairs = zip(self[::2], self[1::2])
            last = self[-1:] if len(self) % 2 else []
            self[:] = [(first[0], first[1] + then[1], first[2] + then[2]) for first, then in pairs] + last

    def correct(self, at: float, by: float) -> bool:
        """Add to the group of a number that came at a time; returns False if that was dropped."""
        index = bisect_right(self, (at, inf, inf)) - 1
        if index < 0:
            return False
        first, num, total = self[index]
        self[index] = (first, num, total + by)
        return True

    def drop(self, until: float) -> None:
        """Drop groups that begin at a time or earlier."""
        if self and self[0][0] <= until:
            del self[: bisect_right(self, (until, inf, inf))]

    def num(self, since: float = -inf) -> int:
        """Return how many numbers are in groups that begin after a time."""
        return sum(num for at, num, _ in self if at > since)

    def total(self) -> float:
        """Return the sum of all."""
        return sum(total for _, _, total in self)
