"""Many shapes as an array, and their costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from graphs.shape import BatchShape, BroadcastCost, CostFunction, Phase

Levels: TypeAlias = NDArray[np.int64]
"""``[n, 7]``: a row is ``BatchShape.levels``, which are c, s, u, Q, NS, NU, N."""
Floats: TypeAlias = NDArray[np.float64]

QUERY = 3
"""The column of the first size."""
PHASES = tuple(Phase.all())


def to_levels(shapes: Iterable[BatchShape]) -> Levels:
    """Shapes as int64 ``[n, 7]``."""
    return np.array([shape.levels for shape in shapes], dtype=np.int64).reshape(-1, 7)


def to_shapes(levels: Levels) -> tuple[BatchShape, ...]:
    """Rows of int64 ``[n, 7]`` as shapes."""
    rows = levels.tolist()
    return tuple(BatchShape(Phase(bool(c), bool(s), bool(u)), *sizes) for c, s, u, *sizes in rows)


def price(cost: CostFunction, levels: Levels) -> Floats:
    """The cost of every row, float64 ``[n]``."""
    # ``isinstance`` of the class is cached by Python; of the instance it costs more than pricing a few rows.
    if not issubclass(type(cost), BroadcastCost):
        return np.array([cost(shape) for shape in to_shapes(levels)], dtype=np.float64)
    code, sizes = phase_numbers(levels), levels[:, QUERY:].T.astype(np.float64)
    at = cast(BroadcastCost, cost).at
    prices = np.empty(len(levels))
    numbers = sorted({*code.tolist()})
    if len(numbers) == 1:
        prices[:] = at(PHASES[numbers[0]], *sizes)
        return prices
    for number in numbers:
        rows = np.flatnonzero(code == number)
        prices[rows] = at(PHASES[number], *sizes[:, rows])
    return prices


def phase_numbers(levels: Levels) -> Levels:
    """The number of each row's phase in ``Phase.all()``."""
    return levels[:, 0] * 4 + levels[:, 1] * 2 + levels[:, 2]
