"""The search for a table: cover all cells, fill for the traffic, then move buckets."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from graphs.limits import StepLimits
from graphs.planner.cells import CAUSAL, LOGITS, SHARED, UNIQUE, Bools, Cells, price_along, serves
from graphs.planner.evaluation import Prototypes, Traffic
from graphs.prices import QUERY, Floats, Levels, price, to_levels
from graphs.shape import CostFunction

_SPREAD_SIZES = 20
_NEAR_SIZES = 4
_ENOUGH = 2e-3
_MAX_SWEEPS = 10
_WORTHWHILE = 2e-4
_PATIENCE = 12
_MOST_REPLACED = 4
_TRIED = 256
_LACKING = 1e18
_BLOCKS = {1: SHARED, 2: UNIQUE}


@dataclass(frozen=True, eq=False)
class Duties:
    """Shapes that a table has to hold, independent of the traffic.

    Attributes:
        tops: shapes, int64 ``[n, 7]``.
        ceiling: most that the bucket of each may cost, float64 ``[n]``.
    """

    tops: Levels
    ceiling: Floats

    def met_by(self, buckets: Levels, prices: Floats) -> Bools:
        """Return for each bucket and duty whether the bucket fulfils it, bool ``[m, n]``."""
        return serves(buckets, self.tops) & (prices[:, None] <= self.ceiling[None, :])


@dataclass(frozen=True)
class Demand:
    """Shapes that a table serves, and the cost of serving them.

    The steps of a shape cost the price of their bucket times ``weight``, plus ``strain`` times the amount by
    which the price exceeds ``bound``.

    Attributes:
        shapes: int64 ``[n, 7]``.
        weight, bound, strain: float64 ``[n]`` each.
    """

    shapes: Levels
    weight: Floats
    bound: Floats
    strain: Floats

    @classmethod
    def of(cls, shapes: Levels, weight: Floats, own: Floats, worst_case: float, emphasis: float) -> Demand:
        """Create the demand of steps of exact cost ``own``, to be padded by up to ``worst_case``.

        Args:
            emphasis: cost, in units of the whole traffic, of exceeding the bound for every distinct shape by
                as much as the bound allows; independent of how often a shape occurs.
        """
        strain = emphasis * float(weight @ own) / (len(own) * own)
        return cls(shapes, weight, (1 + worst_case) * own, strain)

    def paid(self, prices: Floats, rows: Levels | slice = slice(None)) -> Floats:
        """Cost of some shapes in buckets of these prices, float64 like ``prices``; ``[.., len(rows)]``."""
        over = np.asarray(prices - self.bound[rows])
        np.maximum(over, 0.0, out=over)
        over *= self.strain[rows]
        over += self.weight[rows] * prices
        return over

    def saved(self, rest: Floats, prices: Floats, rows: Levels) -> Floats:
        """Savings of buckets of these prices over ``rest``, the cost of each shape without them.

        Args:
            rest: float64 ``[n]``.
            prices: float64 ``[k]``.
            rows: shapes, int64 ``[m]``.

        Returns:
            float64 ``[k, m]``.
        """
        saved = self.paid(prices[:, None], rows)
        np.subtract(rest[rows], saved, out=saved)
        return np.maximum(saved, 0.0, out=saved)

    def worth(self, spent: Floats) -> Floats:
        """Prices above which no bucket serves the shapes for less than ``spent``, float64 ``[n]``."""
        # A price above the bound costs even more. The margin is for rounding.
        return spent / self.weight * (1 + 1e-9)

    @cached_property
    def columns(self) -> Levels:
        """The sizes of all shapes, one row for each column, int64 ``[7, n]``."""
        return np.ascontiguousarray(self.shapes.T)

    @cached_property
    def distinct(self) -> tuple[tuple[Levels, Levels], ...]:
        """The distinct sizes of each column, ascending, and the place of each shape's size among them."""
        return tuple(np.unique(column, return_inverse=True) for column in self.columns)


class Descent:
    """Improves a table by moving one size of one bucket at a time, and by replacing a few buckets at once.

    A move sets one size to the best of some sizes of the traffic that the bucket may serve; the total never
    rises. When no bucket moves any more, a few buckets that save little are replaced by candidates, and the
    table around them is moved again; the better table is retained. The result is a local optimum of all
    moves, as in alternating (Lloyd) and swap heuristics for k-median.

    Args:
        demand: shapes to serve; each fits some bucket at all times.
        candidates: replacements to try, int64 ``[m, 7]``.
    """

    def __init__(self, demand: Demand, candidates: Levels, cost: CostFunction) -> None:
        self._demand = demand
        self._candidates = candidates
        self._candidate_prices = price(cost, candidates)
        self._cost = cost
        self._draft: tuple[tuple[bytes, Duties], _Table, random.Random] | None = None

    def improve(self, buckets: Levels, duties: Duties, rounds: int) -> Levels:
        """Return a table that is at least as good and no larger, int64 ``[m, 7]``.

        Every bucket of it is the cheapest one of some shape, or fulfils a duty that no other does. Every part
        of a bucket's phase occurs in a shape that it holds.

        Args:
            buckets: hold all of the demand, and fulfil all duties.
            duties: shapes that must stay held, within a price.
            rounds: number of times that some buckets are replaced, unless that helped little twelve times in
                a row. Deterministic for a given number.
        """
        best, chance = self._settled(buckets, duties)
        in_vain = 0
        for _ in range(rounds if len(buckets) > 1 else 0):
            trial = best.copy()
            trial.settle(self._replace(trial, chance), chance)
            in_vain += 1
            if trial.total < best.total * (1 - _WORTHWHILE):
                in_vain = 0
            if trial.total < best.total:
                best = trial
            if in_vain == _PATIENCE:
                break
        return best.tidied()

    def _settled(self, buckets: Levels, duties: Duties) -> tuple[_Table, random.Random]:
        """The table before replacements, and the state of the random generator; a draft has both."""
        key = (buckets.tobytes(), duties)
        if self._draft is None or self._draft[0] != key:
            chance, table = random.Random(0), _Table(buckets.copy(), self._demand, duties, self._cost)
            table.settle(range(len(buckets)), chance)
            self._draft = key, table, chance
        return self._draft[1], copy.copy(self._draft[2])

    def _replace(self, table: _Table, chance: random.Random) -> list[int]:
        """Replace up to four buckets that save little; returns those with changed traffic."""
        served_by = table.paid.argmin(axis=0)
        loss = table.losses() * [chance.expovariate(1.0) for _ in table.buckets]
        wanted = chance.randint(1, min(_MOST_REPLACED, len(loss) - 1))
        gone: list[int] = []
        for bucket in np.argsort(loss, kind="stable")[:wanted].tolist():
            if np.isfinite(loss[bucket]) and table.spares([*gone, bucket]):
                gone.append(bucket)
        few = sorted(chance.sample(range(len(self._candidates)), min(_TRIED, len(self._candidates))))
        candidates, prices = self._candidates[few], self._candidate_prices[few]
        current = np.delete(table.paid, gone, axis=0).min(axis=0)
        tried, rows = self._improved(candidates, prices, current)
        paid = self._demand.paid(prices[tried], rows)
        for bucket in gone:
            savings = np.bincount(tried, np.maximum(current[rows] - paid, 0.0), minlength=len(few))
            ranked = np.argsort(-savings, kind="stable")[:3].tolist()
            pick = ranked[0] if chance.random() < 0.6 else chance.choice(ranked)
            table.put(bucket, candidates[pick], prices[pick])
            served = rows[tried == pick]
            current[served] = np.minimum(current[served], paid[tried == pick])
        serves_now = table.paid.argmin(axis=0)
        has_moved = served_by != serves_now
        return sorted({*gone, *served_by[has_moved].tolist(), *serves_now[has_moved].tolist()})

    def _improved(self, candidates: Levels, prices: Floats, current: Floats) -> tuple[Levels, Levels]:
        """Pairs of a candidate and a shape that it may serve for less than ``current``.

        They are few: most candidates cost more than the buckets of most shapes.
        """
        worth = self._demand.worth(current)
        tried, rows = (serves(candidates, self._demand.shapes) & (prices[:, None] < worth)).nonzero()
        return tried, rows


class _Table:
    """Buckets during moves, with the cost of every shape in each."""

    def __init__(self, buckets: Levels, demand: Demand, duties: Duties, cost: CostFunction) -> None:
        self.buckets = buckets
        self._demand = demand
        self._duties = duties
        self._cost = cost
        prices = price(cost, buckets)
        self.paid = _paid(buckets, prices, demand)
        self._meets = duties.met_by(buckets, prices)
        self._num_meeting = self._meets.sum(axis=0)

    def copy(self) -> _Table:
        copied = copy.copy(self)
        copied.buckets, copied.paid = self.buckets.copy(), self.paid.copy()
        copied._meets, copied._num_meeting = self._meets.copy(), self._num_meeting.copy()
        return copied

    @property
    def total(self) -> float:
        return float(self.paid.min(axis=0).sum())

    def losses(self) -> Floats:
        """Cost of dropping each bucket; infinite for those that no other can replace."""
        served_by, every = self.paid.argmin(axis=0), np.arange(self.paid.shape[1])
        least, others = self.paid[served_by, every], self.paid.copy()
        others[served_by, every] = np.inf
        losses = np.bincount(served_by, others.min(axis=0) - least, minlength=len(self.buckets))
        losses[self._meets[:, self._num_meeting == 1].any(axis=1)] = np.inf
        return np.asarray(losses, dtype=np.float64)

    def spares(self, gone: list[int]) -> bool:
        """Whether all shapes and duties stay held without some buckets."""
        rest = np.delete(np.arange(len(self.buckets)), gone)
        return bool(self._meets[rest].any(axis=0).all() and (self.paid[rest].min(axis=0) < _LACKING).all())

    def put(self, number: int, bucket: Levels, bucket_price: float) -> None:
        self.buckets[number] = bucket
        prices = np.array([bucket_price])
        self.paid[number] = _paid(bucket[None, :], prices, self._demand)[0]
        self._num_meeting -= self._meets[number]
        self._meets[number] = self._duties.met_by(bucket[None, :], prices)[0]
        self._num_meeting += self._meets[number]

    def tidied(self) -> Levels:
        """Return the buckets that are used, without parts that no shape in them has; int64 ``[k, 7]``."""
        gone: list[int] = []
        for number in np.setdiff1d(np.arange(len(self.buckets)), self.paid.argmin(axis=0)).tolist():
            if self.spares([*gone, number]):
                gone.append(number)
        kept = np.delete(self.buckets, gone, axis=0)
        shapes = np.concatenate([self._demand.shapes, self._duties.tops])
        for bucket, held in zip(kept, serves(kept, shapes)):
            bucket[:QUERY] = shapes[held, :QUERY].max(axis=0)
            for letter, blocks in _BLOCKS.items():
                bucket[blocks] *= bucket[letter]
        return kept

    def settle(self, numbers: Iterable[int], chance: random.Random) -> None:
        """Move some buckets until gains are small."""
        order, before = list(numbers), self.total
        for _ in range(_MAX_SWEEPS):
            chance.shuffle(order)
            for number in order:
                self._move(number)
            after = self.total
            if after > before * (1 - _ENOUGH):
                return
            before = after

    def _move(self, number: int) -> None:
        """Move each size of one bucket to where it costs least."""
        rest = self._least_but(number)
        worth = self._demand.worth(rest)
        lowest, most = self._kept(number, rest)
        bucket, columns = self.buckets[number].copy(), self._demand.columns
        fits = _fits(columns, bucket)
        num_failing = (~fits).sum(axis=0, dtype=np.int8)
        for column in self._movable(bucket):
            # Held but for this size.
            rows = np.flatnonzero(num_failing == ~fits[column])
            sizes = self._sizes(bucket, column, rows)
            sizes = sizes[sizes >= lowest[column]]
            prices = price_along(self._cost, bucket, column, sizes)
            sizes, prices = sizes[prices <= most], prices[prices <= most]
            if len(sizes) < 2:
                continue
            rows = rows[worth[rows] > prices.min()]
            saved = self._demand.saved(rest, prices, rows)
            saved *= columns[column, rows] <= sizes[:, None]
            bucket[column] = sizes[int(saved.sum(axis=1).argmax())]
            now = columns[column] <= bucket[column]
            num_failing += fits[column]
            num_failing -= now
            fits[column] = now
        if (bucket != self.buckets[number]).any():
            self.put(number, bucket, float(price(self._cost, bucket[None, :])[0]))

    def _least_but(self, number: int) -> Floats:
        """Cost of each shape without one of the buckets, float64 ``[n]``."""
        before, behind = self.paid[:number], self.paid[number + 1 :]
        return np.minimum(before.min(axis=0, initial=np.inf), behind.min(axis=0, initial=np.inf))

    def _kept(self, number: int, rest: Floats) -> tuple[Levels, float]:
        """Lower bounds of the sizes of a bucket, and its highest price.

        Args:
            rest: cost of each shape in the other buckets.
        """
        is_alone = self._meets[number] & (self._num_meeting == 1)
        lowest = self._duties.tops[is_alone].max(axis=0, initial=0)
        most = self._duties.ceiling[is_alone].min(initial=np.inf)
        unserved = self._demand.shapes[rest >= _LACKING]
        return np.maximum(lowest, unserved.max(axis=0, initial=0)), float(most)

    def _movable(self, bucket: Levels) -> Iterator[int]:
        """Columns that may change: not the phase of decodes, nor the blocks of a part that does not run."""
        for letter, blocks in _BLOCKS.items():
            # With blocks the part has to run.
            if bucket[CAUSAL] and not bucket[blocks]:
                yield letter
        yield QUERY
        yield from (blocks for letter, blocks in _BLOCKS.items() if bucket[letter])
        yield LOGITS

    def _sizes(self, bucket: Levels, column: int, rows: Levels) -> Levels:
        """Values that a column may take: some of those of the traffic, more of them close by.

        Args:
            rows: shapes of the traffic.
        """
        if column < QUERY:
            raised = bucket[:QUERY].copy()
            raised[column] = 1
            # With a phase that no shape has, every step pays for a part that it lacks.
            is_known = (self._demand.columns[:QUERY] == raised[:, None]).all(axis=0).any()
            return np.array([0, 1] if is_known or bucket[column] else [0], dtype=np.int64)
        every, place = self._demand.distinct[column]
        occurs = np.zeros(len(every), dtype=np.bool_)
        occurs[place[rows]] = True
        sizes = every[occurs]
        here = int(sizes.searchsorted(bucket[column]))
        if here == len(sizes) or sizes[here] != bucket[column]:
            sizes = np.concatenate([sizes[:here], bucket[column : column + 1], sizes[here:]])
        if len(sizes) <= _SPREAD_SIZES:
            return sizes
        near = range(max(0, here - _NEAR_SIZES), min(len(sizes), here + _NEAR_SIZES + 1))
        return sizes[sorted(_spread(len(sizes)).union(near))]


@lru_cache(maxsize=1024)
def _spread(num: int) -> frozenset[int]:
    """Some places in a list, from the first to the last at about equal distances."""
    return frozenset(np.linspace(0, num - 1, _SPREAD_SIZES).astype(np.int64).tolist())


def _fits(columns: Levels, bucket: Levels) -> Bools:
    """Return for each size of each shape whether a bucket serves it, bool ``[7, n]``."""
    fits = columns <= bucket[:, None]
    exact = QUERY if not bucket[CAUSAL] else CAUSAL + 1
    fits[:exact] = columns[:exact] == bucket[:exact, None]
    return fits


def _paid(buckets: Levels, prices: Floats, demand: Demand) -> Floats:
    """Cost of each shape in each bucket, float64 ``[m, n]``; very large where it does not fit."""
    return np.where(serves(buckets, demand.shapes), demand.paid(prices[:, None]), _LACKING)


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
       (Chvatal 1979). If it exceeds its share of the budget, the tolerance is raised to about the least that
       fits.
    2. Fill: the candidate that saves the traffic most is added until the budget is spent. Candidates are the
       joins of traffic that agglomeration finds, and the tops of cells. The savings are a monotone
       submodular function, so given the cover they reach ``1 - 1/e`` of the best that the candidates
       allow (Nemhauser, Wolsey, Fisher 1978).
    3. Descent: buckets are moved and replaced (``Descent``) for all rows of the traffic, while the cover
      stays within its tolerance. Cells count as traffic too, with 3 % of the cost, evenly: unrecorded shapes
      should not run in the most expensive bucket.

    Args:
        traffic: weighted shapes to plan for.
        recorded: the part of it that is not from blurring; it proposes buckets of its own.

    Attributes:
        fewest: buckets that hold everything.

    Deterministic: ties go to the first, and random choices have a fixed seed.
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
        # A draft and its final table start equally.
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
        """Cover and fill: at most a number of buckets, and the duties of the cover."""
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
        """The least tolerance, from the requested one on, for a cover of at most ``room`` buckets."""

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
        saved = np.maximum(current[None, :] - self._filler_cost, 0.0)
        added: list[int] = []
        while len(chosen) + len(added) < num_buckets:
            savings = saved @ self._points.weight
            best = int(savings.argmax())
            if savings[best] <= 1e-12 * float(current @ self._points.weight):
                break
            added.append(best)
            cheaper = np.flatnonzero(self._filler_cost[best] < current)
            current[cheaper] = self._filler_cost[best, cheaper]
            saved[:, cheaper] = np.maximum(current[cheaper] - self._filler_cost[:, cheaper], 0.0)
        return np.concatenate([chosen, self._fillers[added]])


def _of_phases(wanted: Levels, buckets: Levels) -> Levels:
    """Those buckets, sorted and each once, whose phase is that of some row of ``wanted``."""
    is_wanted = (buckets[:, None, :QUERY] == wanted[None, :, :QUERY]).all(axis=2).any(axis=1)
    return np.unique(buckets[is_wanted], axis=0)


def _greedy_cover(may_cover: Bools, prices: Floats, most: int | None = None) -> list[int]:
    """Greedy set cover: candidates that cover every column, or the first ``most`` of them."""
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
