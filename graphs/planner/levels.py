"""Many shapes as rows of integers, so that they can be compared and priced together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from graphs.cost import BroadcastCost, CostFunction
from graphs.shape import BatchShape, Phase

# n, m shapes; the 7 columns are those of ``BatchShape.levels``: c, s, u, Q, NS, NU, N.
Levels = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CAUSAL, QUERY, SHARED, UNIQUE, LOGITS = 0, 3, 4, 5, 6
_ROWS_AT_ONCE = 1 << 14
_PHASES = tuple(Phase.all())
_CAUSAL_CODE = 4


def to_levels(shapes: Iterable[BatchShape]) -> Levels:
    """Shapes as int64 ``[n, 7]``."""
    return np.array([shape.levels for shape in shapes], dtype=np.int64).reshape(-1, 7)


def to_shapes(levels: Levels) -> tuple[BatchShape, ...]:
    """Rows of int64 ``[n, 7]`` as shapes."""
    rows = levels.tolist()
    return tuple(BatchShape(Phase(bool(c), bool(s), bool(u)), *sizes) for c, s, u, *sizes in rows)


def price(cost: CostFunction, levels: Levels) -> Floats:
    """The cost of every row, float64 ``[n]``."""
    # The class is asked, which Python remembers; asking the instance takes longer than pricing a few rows.
    if not issubclass(type(cost), BroadcastCost):
        return np.array([cost(shape) for shape in to_shapes(levels)], dtype=np.float64)
    prices = np.empty(len(levels))
    code, sizes = _codes(levels), levels[:, QUERY:].T.astype(np.float64)
    at = cast(BroadcastCost, cost).at
    for number in sorted({*code.tolist()}):
        rows = np.flatnonzero(code == number)
        prices[rows] = at(_PHASES[number], *sizes[:, rows])
    return prices


def holds(buckets: Levels, shapes: Levels) -> Bools:
    """Say for each bucket and shape whether the bucket holds it, bool ``[m, n]``."""
    held = _holds_sizes(buckets, shapes)
    for column in range(QUERY):
        held &= buckets[:, column, None] >= shapes[None, :, column]
    return held


def serves(buckets: Levels, shapes: Levels) -> Bools:
    """Say for each bucket and shape whether the bucket is planned to serve it, bool ``[m, n]``.

    Steps without prompts are served by buckets with just their parts; see ``graphs.decode_twins``.
    """
    return _holds_sizes(buckets, shapes) & _PHASE_SERVES[_codes(buckets)][:, _codes(shapes)]


def _codes(levels: Levels) -> Levels:
    """The number of each row's phase in ``Phase.all()``."""
    return levels[:, 0] * _CAUSAL_CODE + levels[:, 1] * 2 + levels[:, 2]


def _holds_sizes(buckets: Levels, shapes: Levels) -> Bools:
    held = np.ones((len(buckets), len(shapes)), dtype=np.bool_)
    for column, sizes in zip(range(QUERY, buckets.shape[1]), np.ascontiguousarray(shapes[:, QUERY:].T)):
        held &= buckets[:, column, None] >= sizes
    return held


_PHASE_SERVES = np.array(
    [
        [own == other or (own.causal and other.causal and own.holds(other)) for other in _PHASES]
        for own in _PHASES
    ]
)
"""Whether a bucket of one phase serves shapes of another, by their numbers."""


def cheapest(buckets: Levels, prices: Floats, shapes: Levels) -> NDArray[np.int64]:
    """The number of the cheapest bucket that holds each shape, -1 = none, int64 ``[n]``.

    Ties go to the smaller bucket, as in ``BucketTable.fit``.
    """
    found = np.full(len(shapes), -1, dtype=np.int64)
    if not len(buckets):
        return found
    order = np.lexsort((*buckets.T[::-1], prices))
    for start in range(0, len(shapes), _ROWS_AT_ONCE):
        held = holds(buckets[order], shapes[start : start + _ROWS_AT_ONCE])
        first = order[held.argmax(axis=0)]
        found[start : start + _ROWS_AT_ONCE] = np.where(held.any(axis=0), first, -1)
    return found
