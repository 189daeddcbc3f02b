"""Another table for traffic that was seen, as a sequence of exchanges of single buckets."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from graphs.limits import StepLimits
from graphs.planner.cells import Bools, holds
from graphs.planner.evaluation import Traffic
from graphs.planner.plan import plan_table
from graphs.prices import Floats, price, to_levels, to_shapes
from graphs.shape import BatchShape
from graphs.table import BucketTable


@dataclass(frozen=True)
class Exchange:
    """One bucket of a table replaced by another.

    Attributes:
        added, dropped: the new bucket, and the one that leaves.
        padding: mean padding of the traffic in the table after it, by the table's cost.
    """

    added: BatchShape
    dropped: BatchShape
    padding: float


@dataclass(frozen=True)
class Replan:
    """The way from a table to one that pads some traffic less.

    Attributes:
        padding: mean padding of the traffic in the table as it is.
        exchanges: those that save most come first; the table holds every reachable shape after each of them.
    """

    padding: float
    exchanges: tuple[Exchange, ...]

    def to_json(self) -> str:
        """Return it as JSON, for another process."""
        exchanges = [[str(each.added), str(each.dropped), each.padding] for each in self.exchanges]
        return json.dumps({"padding": self.padding, "exchanges": exchanges})

    @classmethod
    def from_json(cls, text: str) -> Replan:
        """Read what ``to_json`` returned."""
        fields = json.loads(text)
        parse = BatchShape.parse
        exchanges = (Exchange(parse(added), parse(dropped), at) for added, dropped, at in fields["exchanges"])
        return cls(fields["padding"], tuple(exchanges))


@dataclass(frozen=True)
class ReplanTask:
    """The arguments of ``replan``, for another process.

    Attributes:
        table: the current table.
        limits: of the steps.
        traffic: recorded shapes and how often each occurs.
    """

    table: BucketTable
    limits: StepLimits
    traffic: Traffic


def replan(table: BucketTable, limits: StepLimits, traffic: Traffic) -> Replan:
    """Plan a table of at most as many buckets for traffic, and the exchanges that lead to it.

    An exchange adds the bucket that saves the traffic most, and drops the one that then costs least to miss,
    of those that leave every reachable shape a bucket. The exchanges end where padding is least.

    Args:
        table: the current table, which holds every reachable shape.
        traffic: recorded shapes and how often each occurs.

    Raises:
        ValueError: see ``plan_table``.
    """
    wanted = plan_table(limits, len(table), traffic, table.cost)
    return _Way(table, wanted, limits, traffic).replan()


class _Way:
    """Greedy exchanges between two tables."""

    def __init__(self, table: BucketTable, wanted: BucketTable, limits: StepLimits, traffic: Traffic) -> None:
        self._buckets = to_levels(sorted({*table, *wanted}))
        shapes = to_levels(traffic)
        weight = np.array(list(traffic.values()), dtype=np.float64)
        prices = price(table.cost, self._buckets)
        self._paid: Floats = np.where(holds(self._buckets, shapes), prices[:, None] * weight, np.inf)
        self._own = float(weight @ price(table.cost, shapes))
        # A table that holds the largest shape of each phase holds every reachable one.
        self._covers = holds(self._buckets, to_levels(map(limits.largest_of, limits.reachable_phases)))
        members = to_shapes(self._buckets)
        self._is_current: Bools = np.array([bucket in table for bucket in members])
        self._is_wanted: Bools = np.array([bucket in wanted for bucket in members])

    def replan(self) -> Replan:
        """Return the exchanges up to the table that pads least."""
        start, found = self._padding(self._is_current), list[Exchange]()
        shapes = to_shapes(self._buckets)
        while (pair := self._next()) is not None:
            added, dropped = pair
            self._is_current[added], self._is_current[dropped] = True, False
            padding = self._padding(self._is_current)
            found.append(Exchange(shapes[added], shapes[dropped], padding))
        paddings = [start, *(each.padding for each in found)]
        return Replan(start, tuple(found[: int(np.argmin(paddings))]))

    def _padding(self, chosen: Bools) -> float:
        return float(self._paid[chosen].min(axis=0).sum()) / self._own - 1

    def _next(self) -> tuple[int, int] | None:
        """The bucket to add and the one to drop; None at the end."""
        waiting = np.flatnonzero(self._is_wanted & ~self._is_current)
        current = self._paid[self._is_current].min(axis=0)
        gains = np.maximum(current - self._paid[waiting], 0.0).sum(axis=1)
        for added in waiting[np.argsort(-gains, kind="stable")].tolist():
            dropped = self._least_missed(added)
            if dropped is not None:
                return added, dropped
        return None

    def _least_missed(self, added: int) -> int | None:
        """The unwanted bucket that costs least to drop once another is added; None if each is needed."""
        best, least = None, np.inf
        for dropped in np.flatnonzero(self._is_current & ~self._is_wanted).tolist():
            rest = self._is_current.copy()
            rest[added], rest[dropped] = True, False
            if not self._holds_all(rest):
                continue
            spent = float(self._paid[rest].min(axis=0).sum())
            if spent < least:
                best, least = dropped, spent
        return best

    def _holds_all(self, chosen: Bools) -> bool:
        return bool(np.all(self._covers[chosen].any(axis=0)))
