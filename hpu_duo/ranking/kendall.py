"""Agreement of two orders."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_SLICE = 512
"""Rows of pairs at a time."""


def kendall_tau(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float:
    """Return Kendall's tau-b: 1 for the same order, -1 for the reverse, 0 for none or for equal values.

    Args:
        first, second: values of the same things, at least two.

    Raises:
        ValueError: they are not of the same length, or fewer than two.
    """
    one, other = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if one.shape != other.shape or one.ndim != 1 or len(one) < 2:
        raise ValueError(
            f"expected two lists of the same length, 2 or more, got {one.shape} and {other.shape}"
        )
    agreeing = differs_in_one = differs_in_other = 0
    for start in range(0, len(one), _SLICE):
        rows = slice(start, start + _SLICE)
        a, b = np.sign(one[rows, None] - one), np.sign(other[rows, None] - other)
        agreeing += int((a * b).sum())
        differs_in_one += int(np.abs(a).sum())
        differs_in_other += int(np.abs(b).sum())
    scale = float(np.sqrt(float(differs_in_one) * float(differs_in_other)))
    return agreeing / scale if scale else 0.0
