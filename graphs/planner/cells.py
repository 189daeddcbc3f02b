"""The reachable shapes of a scheduler, cut into boxes of nearly equal cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from graphs.limits import StepLimits
from graphs.prices import PHASES, QUERY, Floats, Levels, phase_numbers, price
from graphs.shape import BroadcastCost, CostFunction, Phase

Bools = NDArray[np.bool_]

CAUSAL, SHARED, UNIQUE, LOGITS = 0, 4, 5, 6
_ROWS_AT_ONCE = 1 << 14


def price_along(cost: CostFunction, bucket: Levels, column: int, sizes: Levels) -> Floats:
    """The cost of a bucket ``[7]`` with each of some sizes ``[n]`` in one of its columns, float64 ``[n]``."""
    if column < QUERY or not issubclass(type(cost), BroadcastCost):
        tried = np.repeat(bucket[None, :], len(sizes), axis=0)
        tried[:, column] = sizes
        return price(cost, tried)
    # The other sizes are numbers, which takes half the time.
    levels: list[Any] = bucket[QUERY:].astype(np.float64).tolist()
    levels[column - QUERY] = sizes.astype(np.float64)
    prices = cast(BroadcastCost, cost).at(PHASES[int(phase_numbers(bucket[None])[0])], *levels)
    return np.broadcast_to(np.asarray(prices, dtype=np.float64), sizes.shape)


def holds(buckets: Levels, shapes: Levels) -> Bools:
    """Return for each bucket and shape whether the bucket holds it, bool ``[m, n]``."""
    held = _holds_sizes(buckets, shapes)
    for column in range(QUERY):
        held &= buckets[:, column, None] >= shapes[None, :, column]
    return held


def serves(buckets: Levels, shapes: Levels) -> Bools:
    """Return for each bucket and shape whether the bucket is planned to serve it, bool ``[m, n]``.

    Steps without prompts are served by buckets with exactly their parts; see ``graphs.table``.
    """
    return _holds_sizes(buckets, shapes) & _PHASE_SERVES[phase_numbers(buckets)][:, phase_numbers(shapes)]


def _holds_sizes(buckets: Levels, shapes: Levels) -> Bools:
    held = np.ones((len(buckets), len(shapes)), dtype=np.bool_)
    for column, sizes in zip(range(QUERY, buckets.shape[1]), np.ascontiguousarray(shapes[:, QUERY:].T)):
        held &= buckets[:, column, None] >= sizes
    return held


_PHASE_SERVES = np.array(
    [
        [own == other or (own.causal and other.causal and own.holds(other)) for other in PHASES]
        for own in PHASES
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


_SIZES = (QUERY, SHARED, UNIQUE, LOGITS)
_GROWTH = 2.0**0.25
_RATIOS = (1.08, 1.1, 1.12, 1.15, 1.2, 1.25, 1.3, 1.4, 1.6, 2.0)


@dataclass(frozen=True)
class Cells:
    """Boxes that cover all reachable shapes: ``lowest <= shape <= highest`` in one of them.

    Attributes:
        lowest, highest: corners, int64 ``[n, 7]``; both are reachable shapes.
        floor, ceiling: their costs, float64 ``[n]``.
    """

    lowest: Levels
    highest: Levels
    floor: Floats
    ceiling: Floats

    def __len__(self) -> int:
        return len(self.floor)

    @classmethod
    def within(cls, limits: StepLimits, cost: CostFunction, most: int = 4000) -> Cells:
        """The finest boxes of at most about ``most`` in number.

        Each phase starts as one box and is halved, along the size that changes its cost most, until no box
        costs more at its top than a small multiple of its cost at the bottom. Cuts are on common geometric
        grids, so that boxes of different parts and phases align and one bucket serves many.
        """
        for ratio in _RATIOS:
            pieces: list[Cells] = []
            for phase in limits.reachable_phases:
                piece = _cut(limits, phase, cost, ratio, most - sum(map(len, pieces)))
                if piece is None:
                    break
                pieces.append(piece)
            else:
                return _joined(pieces)
        return _joined([_whole(limits, phase, cost) for phase in limits.reachable_phases])


def lowest_of(limits: StepLimits, phase: Phase) -> tuple[int, int, int, int]:
    """Smallest sizes ``(Q, NS, NU, N)`` of a phase."""
    return limits.fewest_tokens(phase), 0, 0, 1


def reachable_corners(lowest: Levels, highest: Levels, decode_len: int) -> tuple[Levels, Levels, Bools]:
    """Shrink boxes to their reachable shapes.

    A row has at least one token, so a step with a causal part has no more logit rows than query tokens;
    without it no row has more than ``decode_len``, and rows between them may be unused.

    Returns:
        ``(lowest, highest, is_reachable)``; the last is False for boxes without any reachable shape.
    """
    low, high = lowest.copy(), highest.copy()
    is_causal = lowest[:, 0] == 1
    query, rows = low[:, QUERY], low[:, LOGITS]
    low[:, QUERY] = np.where(is_causal, np.maximum(query, rows), query)
    low[:, LOGITS] = np.where(is_causal, rows, np.maximum(rows, -(-query // decode_len)))
    query, rows = high[:, QUERY], high[:, LOGITS]
    high[:, LOGITS] = np.where(is_causal, np.minimum(rows, query), rows)
    high[:, QUERY] = np.where(is_causal, query, np.minimum(query, decode_len * rows))
    is_reachable: Bools = np.asarray((low <= high).all(axis=1))
    return low, high, is_reachable


def _ladder(high: int) -> Levels:
    """Sizes after which boxes may be cut."""
    steps = int(np.ceil(np.log(max(high, 1)) / np.log(_GROWTH))) + 1
    points = np.unique(np.rint(_GROWTH ** np.arange(steps)).astype(np.int64))
    return np.concatenate([[0], points[points < high]])


def _whole(limits: StepLimits, phase: Phase, cost: CostFunction) -> Cells:
    highest = np.array([limits.largest_of(phase).levels], dtype=np.int64)
    lowest = highest.copy()
    lowest[0, QUERY:] = lowest_of(limits, phase)
    lowest, highest, _ = reachable_corners(lowest, highest, limits.decode_len)
    return Cells(lowest, highest, price(cost, lowest), price(cost, highest))


def _joined(pieces: list[Cells]) -> Cells:
    return Cells(
        np.concatenate([piece.lowest for piece in pieces]),
        np.concatenate([piece.highest for piece in pieces]),
        np.concatenate([piece.floor for piece in pieces]),
        np.concatenate([piece.ceiling for piece in pieces]),
    )


def _cut(limits: StepLimits, phase: Phase, cost: CostFunction, ratio: float, most: int) -> Cells | None:
    """Halve the box of one phase until each piece is within ``ratio``; None if there are too many."""
    root = _whole(limits, phase, cost)
    ladders = {column: _ladder(int(root.highest[0, column])) for column in _SIZES}
    done: list[Cells] = []
    todo = root
    while len(todo):
        cut_column, cut_after = _best_cuts(todo, cost, ladders)
        is_done = (todo.ceiling <= ratio * todo.floor) | (cut_column < 0)
        done.append(_select(todo, is_done))
        rest = _select(todo, ~is_done)
        if sum(map(len, done)) + 2 * len(rest) > most:
            return None
        todo = _halve(rest, cut_column[~is_done], cut_after[~is_done], cost, limits.decode_len)
    return _joined(done)


def _select(cells: Cells, mask: Bools) -> Cells:
    return Cells(cells.lowest[mask], cells.highest[mask], cells.floor[mask], cells.ceiling[mask])


def _best_cuts(cells: Cells, cost: CostFunction, ladders: dict[int, Levels]) -> tuple[Levels, Levels]:
    """For each box the column to cut, -1 = none, and the size after which to cut."""
    best = np.zeros(len(cells))
    column_of = np.full(len(cells), -1, dtype=np.int64)
    after_of = np.zeros(len(cells), dtype=np.int64)
    for column, ladder in ladders.items():
        first = np.searchsorted(ladder, cells.lowest[:, column], side="left")
        last = np.searchsorted(ladder, cells.highest[:, column], side="left") - 1
        lowered = cells.highest.copy()
        lowered[:, column] = cells.lowest[:, column]
        # A constant price has a small weight: boxes of equal cost need no cut.
        gain = cells.ceiling / price(cost, lowered)
        is_better = (first <= last) & (gain > best)
        best[is_better] = gain[is_better]
        column_of[is_better] = column
        middle = np.clip((first + last) // 2, 0, len(ladder) - 1)
        after_of[is_better] = ladder[middle][is_better]
    return column_of, after_of


def _halve(cells: Cells, column: Levels, after: Levels, cost: CostFunction, decode_len: int) -> Cells:
    row = np.arange(len(cells))
    below, above = cells.highest.copy(), cells.lowest.copy()
    below[row, column] = after
    above[row, column] = after + 1
    lowest, highest, is_reachable = reachable_corners(
        np.concatenate([cells.lowest, above]), np.concatenate([below, cells.highest]), decode_len
    )
    lowest, highest = lowest[is_reachable], highest[is_reachable]
    return Cells(lowest, highest, price(cost, lowest), price(cost, highest))
