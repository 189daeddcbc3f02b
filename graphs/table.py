"""The table of buckets, and the search for the bucket of a step."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import or_

import numpy as np

from graphs.cost import CostFunction, StepCost
from graphs.exponential import ExponentialRule
from graphs.limits import StepLimits
from graphs.promise import Promise
from graphs.shape import BatchShape

_NUM_NEAREST = 3


@dataclass(frozen=True)
class Miss:
    """No bucket of a table holds ``shape``; ``nearest`` are the buckets that lack least, best first."""

    shape: BatchShape
    nearest: tuple[BatchShape, ...]

    def __str__(self) -> str:
        nearest = ", ".join(map(str, self.nearest)) or "none, the table is empty"
        return f"no bucket holds {self.shape}; nearest buckets: {nearest}"


@dataclass(frozen=True)
class BucketTable:
    """A set of buckets that finds the cheapest one for a shape.

    A plain value: two tables with equal buckets and cost are equal, and nothing in it changes.

    Args:
        buckets: in any order, repeats allowed; kept sorted and unique.
        cost: ranks the buckets that hold a shape; ties go to the smaller bucket.
        promise: padding that it was planned for; None where nothing is known of that.
    """

    buckets: tuple[BatchShape, ...]
    cost: CostFunction = field(default_factory=StepCost)
    promise: Promise | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", tuple(sorted(set(self.buckets))))

    @classmethod
    def from_strings(cls, texts: Iterable[str], cost: CostFunction | None = None) -> "BucketTable":
        """Build a table from printed shapes.

        Raises:
            ValueError: a text is not a shape.
        """
        return cls(tuple(map(BatchShape.parse, texts)), cost or StepCost())

    @classmethod
    def exponential(
        cls,
        limits: StepLimits,
        rule: ExponentialRule | None = None,
        cost: CostFunction | None = None,
    ) -> "BucketTable":
        """Build a table that covers every shape that ``limits`` make reachable, and exceeds none of them.

        Every bucket costs a compilation, so the full grid of geometric sizes (hundreds) is thinned to tens:
        a size is left out when a larger bucket of its phase costs at most ``rule.slack`` times as much. The
        result is fine along the sizes that dominate a phase's cost (unique blocks in long decodes, query
        times shared blocks in long prefills) and coarse elsewhere (rows of a decode, which is bound by
        reading the weights).

        Coverage: the grid of each reachable phase contains the shape with every size at its limit, which
        holds all others of that phase and, being the most expensive, survives the thinning.

        Args:
            limits: of the scheduler's steps.
            rule: default ``ExponentialRule()``.
            cost: default ``StepCost(block_size=limits.block_size)``.
        """
        cost = cost or StepCost(block_size=limits.block_size)
        return cls((rule or ExponentialRule()).build(limits, cost), cost)

    def __iter__(self) -> Iterator[BatchShape]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def __contains__(self, shape: object) -> bool:
        return shape in self._members

    def with_buckets(self, shapes: Iterable[BatchShape]) -> "BucketTable":
        """This table plus ``shapes``."""
        return replace(self, buckets=(*self.buckets, *shapes))

    @cached_property
    def by_cost(self) -> tuple[BatchShape, ...]:
        """The buckets from cheapest to most expensive."""
        return tuple(sorted(self.buckets, key=lambda bucket: (self.cost(bucket), bucket)))

    @property
    def largest(self) -> BatchShape:
        """The most expensive bucket.

        Raises:
            ValueError: the table is empty.
        """
        self._check_not_empty()
        return self.by_cost[-1]

    @property
    def envelope(self) -> BatchShape:
        """The smallest shape that holds every bucket, which need not be a bucket itself.

        Raises:
            ValueError: the table is empty.
        """
        self._check_not_empty()
        return reduce(or_, self.buckets)

    def fit(self, shape: BatchShape) -> BatchShape | Miss:
        """The cheapest bucket that holds ``shape``, or a ``Miss`` that names the nearest ones."""
        wanted = np.array(shape.levels, dtype=np.int64)[:, None]
        held_by = np.flatnonzero((self._levels >= wanted).all(axis=0))
        if held_by.size:
            return self.by_cost[held_by[0]]
        return Miss(shape, self.nearest(shape))

    def nearest(self, shape: BatchShape) -> tuple[BatchShape, ...]:
        """Up to three buckets that lack least: fewest dimensions too small, then smallest relative gap."""

        def shortfall(bucket: BatchShape) -> tuple[int, float]:
            lacking = [(need, have) for need, have in zip(shape.levels, bucket.levels) if have < need]
            return len(lacking), sum((need - have) / need for need, have in lacking)

        return tuple(sorted(self.by_cost, key=shortfall)[:_NUM_NEAREST])

    @cached_property
    def _members(self) -> frozenset[BatchShape]:
        return frozenset(self.buckets)

    @cached_property
    def _levels(self) -> np.ndarray:
        """int64 [7, buckets], cheapest bucket first, so that the first column that holds a shape wins."""
        return np.array([bucket.levels for bucket in self.by_cost], dtype=np.int64).reshape(-1, 7).T.copy()

    def _check_not_empty(self) -> None:
        if not self.buckets:
            raise ValueError("expected a table with at least one bucket, got an empty one")
