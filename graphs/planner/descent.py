"""Improve a table by moving its buckets, size by size, towards the traffic."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from graphs.cost import CostFunction
from graphs.planner.levels import CAUSAL, QUERY, SHARED, UNIQUE, Bools, Floats, Levels, price, serves

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


@dataclass(frozen=True)
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

    def paid(self, prices: Floats) -> Floats:
        """Cost of each shape in buckets of these prices, float64 like ``prices``; ``[.., n]``."""
        return self.weight * prices + self.strain * np.maximum(prices - self.bound, 0.0)

    def select(self, rows: Levels) -> Demand:
        """Return the demand of some of the shapes."""
        return Demand(self.shapes[rows], self.weight[rows], self.bound[rows], self.strain[rows])


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
        chance = random.Random(0)
        best = _Table(buckets.copy(), self._demand, duties, self._cost)
        best.settle(range(len(buckets)), chance)
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
        paid = _paid(candidates, prices, self._demand)
        current = np.delete(table.paid, gone, axis=0).min(axis=0)
        for bucket in gone:
            savings = np.maximum(current[None, :] - paid, 0.0).sum(axis=1)
            ranked = np.argsort(-savings, kind="stable")[:3].tolist()
            pick = ranked[0] if chance.random() < 0.6 else chance.choice(ranked)
            table.put(bucket, candidates[pick], prices[pick])
            current = np.minimum(current, paid[pick])
        has_moved = served_by != table.paid.argmin(axis=0)
        return sorted({*gone, *served_by[has_moved].tolist(), *table.paid.argmin(axis=0)[has_moved].tolist()})


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

    def copy(self) -> _Table:
        copied = copy.copy(self)
        copied.buckets, copied.paid = self.buckets.copy(), self.paid.copy()
        copied._meets = self._meets.copy()
        return copied

    @property
    def total(self) -> float:
        return float(self.paid.min(axis=0).sum())

    def losses(self) -> Floats:
        """Cost of dropping each bucket; infinite for those that no other can replace."""
        ranked = np.partition(self.paid, 1, axis=0)
        losses = np.bincount(
            self.paid.argmin(axis=0), weights=ranked[1] - ranked[0], minlength=len(self.buckets)
        )
        is_only = self._meets.sum(axis=0) == 1
        losses[self._meets[:, is_only].any(axis=1)] = np.inf
        return np.asarray(losses, dtype=np.float64)

    def spares(self, gone: list[int]) -> bool:
        """Whether all shapes and duties stay held without some buckets."""
        rest = np.delete(np.arange(len(self.buckets)), gone)
        return bool(self._meets[rest].any(axis=0).all() and (self.paid[rest].min(axis=0) < _LACKING).all())

    def put(self, number: int, bucket: Levels, bucket_price: float) -> None:
        self.buckets[number] = bucket
        prices = np.array([bucket_price])
        self.paid[number] = _paid(bucket[None, :], prices, self._demand)[0]
        self._meets[number] = self._duties.met_by(bucket[None, :], prices)[0]

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
        rest = np.delete(self.paid, number, axis=0).min(axis=0, initial=np.inf)
        is_alone = self._meets[number] & (self._meets.sum(axis=0) == 1)
        lowest = self._duties.tops[is_alone].max(axis=0, initial=0)
        most = self._duties.ceiling[is_alone].min(initial=np.inf)
        lowest = np.maximum(lowest, self._demand.shapes[rest >= _LACKING].max(axis=0, initial=0))
        bucket = self.buckets[number].copy()
        fits = self._demand.shapes <= bucket
        fits[:, CAUSAL] = self._demand.shapes[:, CAUSAL] == bucket[CAUSAL]
        if not bucket[CAUSAL]:
            fits[:, :QUERY] = self._demand.shapes[:, :QUERY] == bucket[:QUERY]
        for column in range(bucket.size):
            is_held = np.delete(fits, column, axis=1).all(axis=1)
            sizes = self._sizes(bucket, column, self._demand.shapes[is_held, column])
            sizes = sizes[sizes >= lowest[column]]
            tried = np.repeat(bucket[None, :], len(sizes), axis=0)
            tried[:, column] = sizes
            prices = price(self._cost, tried)
            sizes, prices = sizes[prices <= most], prices[prices <= most]
            if len(sizes) < 2:
                continue
            rows = np.flatnonzero(is_held)
            some = self._demand.select(rows)
            saved = np.maximum(rest[rows] - some.paid(prices[:, None]), 0.0)
            saved *= some.shapes[:, column] <= sizes[:, None]
            bucket[column] = sizes[int(saved.sum(axis=1).argmax())]
            fits[:, column] = self._demand.shapes[:, column] <= bucket[column]
        if (bucket != self.buckets[number]).any():
            self.put(number, bucket, float(price(self._cost, bucket[None, :])[0]))

    def _sizes(self, bucket: Levels, column: int, wanted: Levels) -> Levels:
        """Values that a column may take: some of those of the traffic, more of them close by."""
        if column == CAUSAL or (column < QUERY and not bucket[CAUSAL]):
            return bucket[column : column + 1]
        if column < QUERY:
            if column in _BLOCKS and bucket[_BLOCKS[column]]:
                return bucket[column : column + 1]
            raised = bucket[:QUERY].copy()
            raised[column] = 1
            # With a phase that no shape has, every step pays for a part that it lacks.
            is_known = (self._demand.shapes[:, :QUERY] == raised).all(axis=1).any()
            return np.array([0, 1] if is_known or bucket[column] else [0], dtype=np.int64)
        part = {SHARED: 1, UNIQUE: 2}.get(column)
        if part is not None and not bucket[part]:
            return bucket[column : column + 1]
        sizes = np.unique(np.append(wanted, bucket[column]))
        if len(sizes) <= _SPREAD_SIZES:
            return sizes
        here = int(np.searchsorted(sizes, bucket[column]))
        spread = np.linspace(0, len(sizes) - 1, _SPREAD_SIZES).astype(np.int64)
        near = np.arange(max(0, here - _NEAR_SIZES), min(len(sizes), here + _NEAR_SIZES + 1))
        return sizes[np.union1d(spread, near)]


def _paid(buckets: Levels, prices: Floats, demand: Demand) -> Floats:
    """Cost of each shape in each bucket, float64 ``[m, n]``; very large where it does not fit."""
    return np.where(serves(buckets, demand.shapes), demand.paid(prices[:, None]), _LACKING)
