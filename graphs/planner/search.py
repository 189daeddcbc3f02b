"""The search for a table: cover all cells, spend the rest of the budget on the traffic, then move buckets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from graphs.cost import CostFunction
from graphs.limits import StepLimits
from graphs.planner.cells import Cells
from graphs.planner.descent import Demand, Descent, Duties
from graphs.planner.levels import QUERY, Bools, Floats, Levels, price, serves, to_levels
from graphs.planner.traffic import Prototypes, Traffic

_BISECTIONS = 14
_LOOSEST = 1e6
_UNSEEN_SHARE = 0.03
_EMPHASIS = 0.1


@dataclass(frozen=True)
class Resolution:
    """Resolution of the shapes, and effort of the search.

    Args:
        num_cells: boxes that the reachable shapes are cut into, about.
        num_points: rows that the traffic is gathered in to propose buckets, about.
        num_rows: rows of the traffic that buckets are moved for, about.
        rounds: number of times that some buckets are replaced; at most once per bucket of the budget.
    """

    num_cells: int = 2000
    num_points: int = 400
    num_rows: int = 12_000
    rounds: int = 40


class TableSearch:
    """Chooses buckets for cells that must be held and traffic that should be cheap.

    1. Cover: greedy set cover of all cells by buckets that cost at most ``1 + tolerance`` times the cheapest
       shape in them, or no more than their top; within ``ln(cells) + 1`` of the fewest candidates possible
       (Chvatal 1979). If it takes more than its share of the budget, the tolerance is raised to about the
       least that fits.
    2. Fill: the candidate that saves the traffic most is added until the budget is spent. Candidates are the
       joins of traffic that agglomeration finds, and the tops of cells. The savings are a monotone
       submodular function, so given the cover they reach ``1 - 1/e`` of the best that the candidates
       allow (Nemhauser, Wolsey, Fisher 1978).
    3. Descent: buckets are moved and replaced (``Descent``) for all rows of the traffic, while the cover
       keeps to its tolerance. Cells count as traffic too, with 3 % of the cost, all alike: what nobody
       recorded should not fall into the most expensive bucket.

    Args:
        traffic: weighted shapes to plan for.
        recorded: the part of it that is not from blurring; it proposes buckets of its own.

    Attributes:
        fewest: buckets that hold everything.

    Every step takes the first of equals, and random choices start from the same seed, so the same input gives
    the same table.
    """

    def __init__(
        self,
        limits: StepLimits,
        cost: CostFunction,
        traffic: Traffic,
        recorded: Traffic,
        worst_case: float,
        resolution: Resolution,
    ) -> None:
        self._cost = cost
        self._worst_case = worst_case
        # A draft and the table that it is made into start alike.
        self._start = lru_cache(maxsize=1)(self._begin)
        self._rounds = resolution.rounds
        self._cells = Cells.within(limits, cost, resolution.num_cells)
        phases = to_levels(map(limits.largest_of, limits.reachable_phases))
        whole = to_levels([limits.largest])
        self._tops = _of_phases(phases, np.concatenate([self._cells.highest, phases, whole]))
        self._top_prices = price(cost, self._tops)
        self._holds_cell = serves(self._tops, self._cells.highest)
        self.fewest = len(_greedy_cover(self._holds_cell, self._top_prices))
        # A bucket as cheap as the top itself will always do: nothing that holds the top is cheaper.
        # The margin is for rounding, which depends on how many rows are priced together.
        self._enough = price(cost, self._cells.highest) * (1 + 1e-9)

        self._points = Prototypes.of(traffic, cost, resolution.num_points)
        proposed = [
            points.joins(cost)
            for points in (self._points, Prototypes.of(recorded, cost, resolution.num_points))
        ]
        candidates = _of_phases(phases, np.concatenate([*proposed, self._tops]))
        prices = price(cost, candidates)
        self._descent = Descent(
            self._demand(Prototypes.of(traffic, cost, resolution.num_rows)), candidates, cost
        )
        held = serves(candidates, self._points.levels)
        self._fillers = candidates[held.any(axis=1)]
        self._filler_cost = np.where(held, prices[:, None], np.inf)[held.any(axis=1)]

    def find(self, num_buckets: int, cover_share: float, *, is_draft: bool = False) -> Levels:
        """Find at most ``num_buckets`` buckets by the steps above, int64 ``[m, 7]``.

        Every bucket has a reachable phase.

        Args:
            num_buckets: at least 2, since one phase may not hold all others.
            cover_share: share of the buckets that may be spent on the cover.
            is_draft: move buckets, and replace none: much faster, and hardly worse.
        """
        chosen, duties = self._start(num_buckets, cover_share)
        rounds = 0 if is_draft else min(self._rounds, num_buckets)
        return np.unique(self._descent.improve(chosen, duties, rounds), axis=0)

    def _begin(self, num_buckets: int, cover_share: float) -> tuple[Levels, Duties]:
        """Cover and fill: at most so many buckets, and what the cover has to keep to."""
        room = max(self.fewest, int(num_buckets * cover_share))
        tolerance = self._least(room)
        chosen = self._tops[_greedy_cover(self._may_cover(tolerance), self._top_prices)]
        ceiling = np.maximum((1 + tolerance) * self._cells.floor, self._enough)
        return self._filled(chosen, num_buckets), Duties(self._cells.highest, ceiling)

    def _demand(self, rows: Prototypes) -> Demand:
        own = price(self._cost, rows.levels)
        unseen = price(self._cost, self._cells.highest)
        spent = float(rows.weight @ own)
        return Demand.of(
            np.concatenate([rows.levels, self._cells.highest]),
            np.concatenate([rows.weight, _UNSEEN_SHARE * spent / (len(unseen) * unseen)]),
            np.concatenate([own, unseen]),
            self._worst_case,
            _EMPHASIS,
        )

    def _least(self, room: int) -> float:
        """The least tolerance, from the wanted one on, with which a cover takes at most ``room`` buckets."""

        def fits(tolerance: float) -> bool:
            return len(_greedy_cover(self._may_cover(tolerance), self._top_prices, room + 1)) <= room

        if fits(self._worst_case):
            return self._worst_case
        tight, loose = 1 + self._worst_case, 1 + _LOOSEST
        for _ in range(_BISECTIONS):
            middle = (tight * loose) ** 0.5
            tight, loose = (tight, middle) if fits(middle - 1) else (middle, loose)
        return loose - 1

    def _may_cover(self, tolerance: float) -> Bools:
        ceiling = np.maximum((1 + tolerance) * self._cells.floor, self._enough)
        return self._holds_cell & (self._top_prices[:, None] <= ceiling[None, :])

    def _filled(self, chosen: Levels, num_buckets: int) -> Levels:
        prices = price(self._cost, chosen)
        current = np.where(serves(chosen, self._points.levels), prices[:, None], np.inf).min(axis=0)
        added: list[int] = []
        while len(chosen) + len(added) < num_buckets:
            savings = np.maximum(current[None, :] - self._filler_cost, 0.0) @ self._points.weight
            best = int(savings.argmax())
            if savings[best] <= 1e-12 * float(current @ self._points.weight):
                break
            added.append(best)
            current = np.minimum(current, self._filler_cost[best])
        return np.concatenate([chosen, self._fillers[added]])


def _of_phases(wanted: Levels, buckets: Levels) -> Levels:
    """Those buckets, sorted and each once, whose phase is that of some row of ``wanted``."""
    is_wanted = (buckets[:, None, :QUERY] == wanted[None, :, :QUERY]).all(axis=2).any(axis=1)
    return np.unique(buckets[is_wanted], axis=0)


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
