"""The search itself: cover everything first, then spend what is left where the traffic is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from graphs.cost import CostFunction
from graphs.planner.cells import Cells
from graphs.planner.levels import Bools, Floats, Levels, holds, price
from graphs.planner.traffic import Prototypes

_MAX_SWEEPS = 4
_BISECTIONS = 14
_LOOSEST = 1e6


@dataclass(frozen=True)
class Found:
    """A choice of buckets.

    Attributes:
        buckets: int64 ``[m, 7]``.
        seen, unseen: bounds of the padding, relative to a step's cost, that the cover kept to: for steps of
            the traffic, and for all that are reachable.
    """

    buckets: Levels
    seen: float
    unseen: float


class TableSearch:
    """Chooses buckets for cells that must be held and traffic that should be cheap.

    Candidates are the tops of all cells, the joins of traffic that agglomeration finds, and the tightest
    box around the traffic below each top. A choice must hold every cell, and every row of the traffic, by a
    bucket that costs at most ``1 + tolerance`` times the cheapest shape in it, or no more than its top.

    1. Cover: greedy set cover, within ``ln(rows) + 1`` of the fewest candidates possible (Chvatal 1979). If
       it takes more than its share of the budget, the tolerance is raised to about the least that fits,
       first for all cells and then for traffic, which may take half of the rest.
    2. Fill: the bucket that saves the traffic most is added until the budget is spent. The savings are a
       monotone submodular function, so given the cover they reach ``1 - 1/e`` of the best possible
       (Nemhauser, Wolsey, Fisher 1978).
    3. Exchange: one bucket is swapped for one candidate while that helps and the cover holds. The result is
       a local optimum, which no single swap improves; the problem (weighted k-median) is NP-hard.

    Every step takes the first of equals, so the same input gives the same table.
    """

    def __init__(self, cells: Cells, traffic: Prototypes, cost: CostFunction) -> None:
        boxes = _tightest_boxes(cells.highest, traffic.levels)
        every = np.concatenate([cells.highest, traffic.joins(cost), boxes])
        self._candidates = np.unique(every, axis=0)
        self._prices = price(cost, self._candidates)
        # What must be held: first all cells, then all traffic.
        tops = np.concatenate([cells.highest, traffic.levels])
        floor = np.concatenate([cells.floor, traffic.floor])
        self._num_cells = len(cells)
        self._holds = holds(self._candidates, tops)
        self._excess = self._prices[:, None] / floor[None, :] - 1
        # A bucket as cheap as the top itself will always do: nothing that holds the top is cheaper.
        # The margin is for rounding, which depends on how many rows are priced together.
        self._is_top = self._prices[:, None] <= price(cost, tops)[None, :] * (1 + 1e-9)
        held = self._holds[:, self._num_cells :]
        self._wanted = np.flatnonzero(held.any(axis=1))
        self._cost_of = np.where(held[self._wanted], self._prices[self._wanted, None], np.inf)
        self._weight = traffic.weight

    def find(self, num_buckets: int, tolerance: float, cover_share: float) -> Found:
        """The best choice of at most ``num_buckets`` that the steps above find.

        Args:
            tolerance: wanted bound of the padding of any step of the traffic, and of any reachable one,
                relative to its cost.
            cover_share: share of the buckets that may be spent on these bounds.
        """
        room = max(1, int(num_buckets * cover_share))
        unseen = self._least(room, tolerance, lambda wanted: (wanted, _LOOSEST))
        seen = self._least((room + num_buckets) // 2, tolerance, lambda wanted: (unseen, wanted))
        may_cover = self._may_cover(unseen, seen)
        chosen = _greedy_cover(may_cover, self._prices)
        for _ in range(_MAX_SWEEPS):
            before = list(chosen)
            self._drop_needless(chosen, may_cover)
            self._fill(chosen, num_buckets)
            self._exchange(chosen, may_cover)
            if chosen == before:
                break
        return Found(self._candidates[sorted(chosen)], seen, unseen)

    def _least(self, room: int, wanted: float, tolerances: Callable[[float], tuple[float, float]]) -> float:
        """The least tolerance from ``wanted`` on with which a cover takes at most ``room`` buckets."""

        def fits(tolerance: float) -> bool:
            cover = _greedy_cover(self._may_cover(*tolerances(tolerance)), self._prices, room + 1)
            return len(cover) <= room

        if fits(wanted):
            return wanted
        tight, loose = 1 + wanted, 1 + _LOOSEST
        for _ in range(_BISECTIONS):
            middle = (tight * loose) ** 0.5
            tight, loose = (tight, middle) if fits(middle - 1) else (middle, loose)
        return loose - 1

    def _may_cover(self, unseen: float, seen: float) -> Bools:
        tolerance = np.full(self._holds.shape[1], seen)
        tolerance[: self._num_cells] = unseen
        return self._holds & ((self._excess <= tolerance) | self._is_top)

    def _drop_needless(self, chosen: list[int], may_cover: Bools) -> None:
        """Drop buckets without which every cell stays held and no traffic becomes more expensive."""
        for bucket in sorted(chosen, key=lambda c: self._prices[c]):
            rest = [c for c in chosen if c != bucket]
            if may_cover[rest].any(axis=0).all() and self._spent(rest) <= self._spent(chosen) * (1 + 1e-12):
                chosen.remove(bucket)

    def _spent(self, chosen: list[int]) -> float:
        return float(self._current(chosen) @ self._weight)

    def _current(self, chosen: list[int]) -> Floats:
        """What each row of the traffic costs now."""
        of_use = np.flatnonzero(np.isin(self._wanted, chosen))
        return self._cost_of[of_use].min(axis=0, initial=np.inf)

    def _savings(self, current: Floats) -> Floats:
        return np.maximum(current[None, :] - self._cost_of, 0.0) @ self._weight

    def _fill(self, chosen: list[int], num_buckets: int) -> None:
        current = self._current(chosen)
        while len(chosen) < num_buckets:
            savings = self._savings(current)
            best = int(savings.argmax()) if len(savings) else -1
            if best < 0 or savings[best] <= 1e-12 * float(current @ self._weight):
                return
            chosen.append(int(self._wanted[best]))
            current = np.minimum(current, self._cost_of[best])

    def _exchange(self, chosen: list[int], may_cover: Bools) -> None:
        for out in list(chosen):
            rest = [c for c in chosen if c != out]
            current = self._current(rest)
            if not np.isfinite(current).all():
                continue
            lacking = np.flatnonzero(~may_cover[rest].any(axis=0)) if rest else np.arange(may_cover.shape[1])
            is_allowed = may_cover[np.ix_(self._wanted, lacking)].all(axis=1)
            savings = np.where(is_allowed, self._savings(current), -1.0)
            best = int(savings.argmax())
            spent = float(current @ self._weight)
            if savings[best] >= 0 and spent - savings[best] < self._spent(chosen) * (1 - 1e-9):
                chosen[chosen.index(out)] = int(self._wanted[best])


def _greedy_cover(may_cover: Bools, prices: Floats, most: int | None = None) -> list[int]:
    """Candidates that cover every column, or the first ``most`` of them; most new columns first."""
    gains = may_cover.sum(axis=1)
    is_open = np.ones(may_cover.shape[1], dtype=np.bool_)
    chosen: list[int] = []
    while is_open.any() and len(chosen) != most:
        assert gains.max() > 0, f"no candidate holds {is_open.sum()} rows"
        best = np.flatnonzero(gains == gains.max())
        pick = int(best[prices[best].argmin()])
        covered = np.flatnonzero(may_cover[pick] & is_open)
        gains = gains - may_cover[:, covered].sum(axis=1)
        is_open[covered] = False
        chosen.append(pick)
    return chosen


def _tightest_boxes(tops: Levels, shapes: Levels) -> Levels:
    """The join of the shapes below each top, where there are any: int64 ``[m, 7]``."""
    held = holds(tops, shapes)
    some = held.any(axis=1)
    boxes = [np.where(held[some], shapes[None, :, column], 0).max(axis=1) for column in range(tops.shape[1])]
    return np.stack(boxes, axis=1).astype(np.int64)
