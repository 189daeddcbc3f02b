"""Places of needles in a haystack."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")


def place(
    needles: Sequence[T], depths: Sequence[float], pieces: Sequence[T], lengths: Sequence[int]
) -> list[T]:
    """Return the pieces, with each needle before the first piece that starts at or after its depth.

    Args:
        depths: of each needle, as a fraction in [0, 1] of the length of all pieces. Needles of equal depth
            keep their order.
        lengths: of each piece.
    """
    starts = list(accumulate(lengths, initial=0))
    placed = list(pieces)
    # From the back, so that earlier insertions do not move later places.
    for index in sorted(range(len(needles)), key=depths.__getitem__)[::-1]:
        placed.insert(bisect_left(starts, depths[index] * starts[-1]), needles[index])
    return placed
