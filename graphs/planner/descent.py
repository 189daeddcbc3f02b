"""Improve a table by moving its buckets, size by size, towards the traffic."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from graphs.cost import CostFunction
from graphs.planner.levels import CAUSAL, LOGITS, QUERY, SHARED, UNIQUE, Bools, Floats, Levels, price, serves

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
    """Shapes that a table has to hold whatever the traffic is.

    Attributes:
        tops: shapes, int64 ``[n, 7]``.
        ceiling: most that the bucket of each may cost, float64 ``[n]``.
    """

    tops: Levels
    ceiling: Floats

    def met_by(self, buckets: Levels, prices: Floats) -> Bools:
        """Say for each bucket and duty whether the bucket does it, bool ``[m, n]``."""
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
        """Make the demand of steps whose own cost is ``own``, to be padded by up to ``worst_case``.

        Args:
            emphasis: cost, in units of the whole traffic, of exceeding the bound for every distinct shape by
                as much as the bound allows; independent of how often a shape occurs.
        """
        strain = emphasis * float(weight @ own) / (len(own) * own)
        return cls(shapes, weight, (1 + worst_case) * own, strain)

    def paid(self, prices: Floats, rows: Levels | slice = slice(None)) -> Floats:
        """Cost of some shapes in buckets of these prices, float64 like ``prices``; ``[.., len(rows)]``."""
        over = np.maximum(prices - self.bound[rows], 0.0)
        return self.weight[rows] * prices + self.strain[rows] * over

    def worth(self, spent: Floats) -> Floats:
        """Prices above which no bucket serves the shapes for less than ``spent``, float64 ``[n]``."""
        # What exceeds the bound costs more still. The margin is for rounding.
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

    A move takes the best of some sizes of the traffic that the bucket may serve, all else equal; the total
    never rises. When no bucket moves any more, a few buckets that save little are replaced by candidates,
    and the table around them is moved again; the better of the two is kept. The result is a local optimum
    of all moves, as in alternating (Lloyd) and swap heuristics for k-median.

    Args:
        demand: shapes to serve; each is held by some bucket at all times.
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

        Every bucket of it is the cheapest one of some shape, or does a duty that no other does. Every part of
        a bucket's phase occurs in a shape that it holds.

        Args:
            buckets: hold all of the demand, and do all duties.
            duties: shapes that must stay held, within a price.
            rounds: number of times that some buckets are replaced, unless that helped little twelve times in
                a row. The same number gives the same table.
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
        """The table before anything is replaced, and chance as it is then; a draft has both already."""
        key = (buckets.tobytes(), duties)
        if self._draft is None or self._draft[0] != key:
            chance, table = random.Random(0), _Table(buckets.copy(), self._demand, duties, self._cost)
            table.settle(range(len(buckets)), chance)
            self._draft = key, table, chance
        return self._draft[1], copy.copy(self._draft[2])

    def _replace(self, table: _Table, chance: random.Random) -> list[int]:
        """Replace up to four buckets that save little; returns those whose traffic has changed."""
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

        They are few: most candidates cost more than what most shapes have.
        """
        worth = self._demand.worth(current)
        tried, rows = (serves(candidates, self._demand.shapes) & (prices[:, None] < worth)).nonzero()
        return tried, rows


class _Table:
    """Buckets while they are moved, with the cost of every shape in each."""

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
        """Move some buckets until that hardly helps."""
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
            tried = np.repeat(bucket[None, :], len(sizes), axis=0)
            tried[:, column] = sizes
            prices = price(self._cost, tried)
            sizes, prices = sizes[prices <= most], prices[prices <= most]
            if len(sizes) < 2:
                continue
            rows = rows[worth[rows] > prices.min()]
            saved = np.maximum(rest[rows] - self._demand.paid(prices[:, None], rows), 0.0)
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
        """The least that each size of a bucket has to be, and the most that it may cost.

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
        here = int(np.searchsorted(sizes, bucket[column]))
        if here == len(sizes) or sizes[here] != bucket[column]:
            sizes = np.insert(sizes, here, bucket[column])
        if len(sizes) <= _SPREAD_SIZES:
            return sizes
        spread = np.linspace(0, len(sizes) - 1, _SPREAD_SIZES).astype(np.int64)
        near = np.arange(max(0, here - _NEAR_SIZES), min(len(sizes), here + _NEAR_SIZES + 1))
        return sizes[np.union1d(spread, near)]


def _fits(columns: Levels, bucket: Levels) -> Bools:
    """Say of each size of each shape whether a bucket serves it, bool ``[7, n]``."""
    fits = columns <= bucket[:, None]
    exact = QUERY if not bucket[CAUSAL] else CAUSAL + 1
    fits[:exact] = columns[:exact] == bucket[:exact, None]
    return fits


def _paid(buckets: Levels, prices: Floats, demand: Demand) -> Floats:
    """Cost of each shape in each bucket, float64 ``[m, n]``; very large where it does not fit."""
    return np.where(serves(buckets, demand.shapes), demand.paid(prices[:, None]), _LACKING)
