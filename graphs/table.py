"""The table of buckets, the search for the bucket of a step, and a sample of the shapes of steps."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import product
from operator import or_

import numpy as np

from graphs.limits import StepLimits
from graphs.prices import price, to_levels
from graphs.shape import BatchShape, CostFunction, Phase, StepCost, row_len

_TEXT = re.compile(r"padding: (?P<padding>\S+) by (?P<measure>\w+)")


@dataclass(frozen=True)
class PlannedPadding:
    """Padding of the steps that a table was planned for; printed as ``padding: 0.064 by StepSeconds``.

    Attributes:
        padding: mean cost of padded steps over that of exact ones, minus 1.
        measure: name of the kind of cost; padding by another one is not comparable.

    Raises:
        ValueError: a padding that is negative or no number.
    """

    padding: float
    measure: str

    def __post_init__(self) -> None:
        if not 0.0 <= self.padding < float("inf"):
            raise ValueError(f"expected a padding of 0 or more, got {self.padding}")

    @classmethod
    def by(cls, cost: CostFunction, padding: float) -> PlannedPadding:
        """The padding by a cost."""
        # Rounding may result in slightly less than 0.
        return cls(max(0.0, padding), type(cost).__name__)

    @classmethod
    def find(cls, text: str) -> PlannedPadding | None:
        """Read what ``str`` prints from a line of text; None if it is something else.

        Raises:
            ValueError: the padding is no valid number.
        """
        found = _TEXT.search(text)
        if found is None:
            return None
        try:
            return cls(float(found["padding"]), found["measure"])
        except ValueError as error:
            raise ValueError(f"expected a padding of 0 or more, got {found['padding']!r}") from error

    def is_by(self, cost: CostFunction) -> bool:
        """Whether padding by a cost is comparable."""
        return self.measure == type(cost).__name__

    def __str__(self) -> str:
        return f"padding: {self.padding:.4g} by {self.measure}"


class ShapeReservoir:
    """A uniform sample of at most ``capacity`` of the steps so far, whatever their number.

    A step costs a comparison, and seldom more: the number of steps until the sample changes next is drawn
    beforehand. Deterministic.

    Source: algorithm L of Kim-Hung Li, Reservoir-Sampling Algorithms of Time Complexity O(n(1 + log(N/n))),
    ACM Transactions on Mathematical Software 20 (1994).

    Args:
        capacity: of the sample, at least 1.
        seed: of the random generator.

    Attributes:
        num_steps: number of added steps.

    Raises:
        ValueError: a capacity below 1.
    """

    def __init__(self, capacity: int = 8192, seed: int = 0) -> None:
        if capacity < 1:
            raise ValueError(f"expected a reservoir of at least 1 shape, got {capacity}")
        self.num_steps = 0
        self._capacity, self._chance = capacity, random.Random(seed)
        self._kept: list[BatchShape] = []
        self._next, self._log_weight = 1, 0.0

    def add(self, shape: BatchShape) -> None:
        """Add a step."""
        self.num_steps += 1
        if self.num_steps < self._next:
            return
        self._next += 1
        if len(self._kept) < self._capacity:
            self._kept.append(shape)
        else:
            self._kept[self._chance.randrange(self._capacity)] = shape
        if len(self._kept) == self._capacity:
            self._log_weight += self._log_uniform() / self._capacity
            self._next += math.floor(self._log_uniform() / math.log(-math.expm1(self._log_weight)))

    def _log_uniform(self) -> float:
        """Logarithm of a number between 0 and 1, both excluded."""
        return math.log(self._chance.random() or 0.5)

    def counts(self) -> dict[BatchShape, int]:
        """Count each shape in the sample."""
        return dict(Counter(self._kept))


@dataclass(frozen=True)
class _Decodes:
    """The largest decode-only step that a bucket with more parts holds, and what that bucket costs."""

    shape: BatchShape
    ceiling: float


def decode_only_buckets(
    buckets: Iterable[BatchShape], limits: StepLimits, cost: CostFunction
) -> tuple[BatchShape, ...]:
    """Return the missing buckets with which steps without prompts run no other parts than their own.

    A step runs in the cheapest bucket that holds it. So the table needs, for each bucket that has more parts
    than some decodes, one with exactly their parts that is at most as expensive and holds as large decodes:
    exactly then all of them run there. Buckets that are missing are joined while they stay cheap enough.

    Args:
        cost: by which the table finds buckets.
    """
    held = tuple(buckets)
    twins: list[BatchShape] = []
    # Buckets of decodes with shared blocks hold those without, so they come first.
    for phase in sorted(limits.reachable_phases, reverse=True):
        if not phase.causal:
            twins += _joined(_missing((*held, *twins), phase, limits, cost), cost)
    return tuple(twins)


def _joined(missing: Iterable[_Decodes], cost: CostFunction) -> Iterator[BatchShape]:
    left = sorted(missing, key=lambda each: (each.ceiling, each.shape))
    while left:
        first, *rest = left
        twin = first.shape
        for other in rest:
            # The first has the lowest ceiling.
            if cost(twin | other.shape) <= first.ceiling:
                twin |= other.shape
        yield twin
        left = [each for each in rest if not twin.holds(each.shape)]


def _missing(
    held: tuple[BatchShape, ...], phase: Phase, limits: StepLimits, cost: CostFunction
) -> Iterator[_Decodes]:
    own = [(bucket, cost(bucket)) for bucket in held if bucket.phase == phase]
    for bucket in held:
        shape = _decodes_in(bucket, phase, limits)
        if shape is None:
            continue
        ceiling = cost(bucket)
        if not any(price <= ceiling and other.holds(shape) for other, price in own):
            yield _Decodes(shape, ceiling)


def _decodes_in(bucket: BatchShape, phase: Phase, limits: StepLimits) -> BatchShape | None:
    """The join of all steps of a phase that a bucket of another one holds; None where it holds none."""
    if bucket.phase == phase or not bucket.phase.holds(phase) or not bucket.num_logits:
        return None
    largest = limits.largest_of(phase)
    num_logits = min(bucket.num_logits, largest.num_logits)
    return BatchShape(
        phase,
        min(bucket.query_len, num_logits * limits.decode_len),
        min(bucket.num_shared_blocks, largest.num_shared_blocks) if phase.shared else 0,
        min(bucket.num_unique_blocks, largest.num_unique_blocks),
        num_logits,
    )


def ladder(low: int, high: int, growth: float) -> tuple[int, ...]:
    """Sizes from ``low``, each ``growth`` times the last (at least one more), up to exactly ``high``."""
    sizes = []
    size = max(low, 1)
    while size < high:
        sizes.append(size)
        size = max(int(size * growth), size + 1)
    return (*sizes, high)


@dataclass(frozen=True)
class ExponentialRule:
    """Rule by which ``BucketTable.exponential`` chooses sizes.

    Args:
        growth: ratio of neighbouring sizes, above 1. Phases that combine the unique part with another one
            have one dimension more to cover and step by ``growth**2``.
        slack: a size is not worth a compilation of its own when a larger bucket of the same phase costs at
            most this many times as much; 1 merges sizes of equal cost only.
        min_query: smallest query size of phases with a causal part; decodes start at 1.
        min_blocks: smallest block count.
        merge_unique: whether a bucket with an empty unique part may replace one without that part, if a part
            without work costs almost nothing.

    Raises:
        ValueError: a value outside these ranges.
    """

    growth: float = 2.0
    slack: float = 2.0
    min_query: int = 16
    min_blocks: int = 16
    merge_unique: bool = False

    def __post_init__(self) -> None:
        if self.growth <= 1 or self.slack < 1 or self.min_query < 1 or self.min_blocks < 1:
            raise ValueError(
                f"expected growth > 1, slack >= 1, min_query >= 1 and min_blocks >= 1, got {self}"
            )

    def grid(self, limits: StepLimits, phase: Phase) -> Iterator[BatchShape]:
        """Yield every combination of sizes for one phase, up to the limits.

        Logit rows follow the query size until they reach ``max_num_seqs``: a row has at least one token.
        """
        largest = limits.largest_of(phase)
        combines = phase.unique and (phase.causal or phase.shared)
        growth = self.growth**2 if combines else self.growth
        queries = ladder(self.min_query if phase.causal else 1, largest.query_len, growth)
        shared = ladder(self.min_blocks, largest.num_shared_blocks, growth)
        unique = ladder(self.min_blocks, largest.num_unique_blocks, growth)
        for query_len, num_shared, num_unique in product(queries, shared, unique):
            yield BatchShape(phase, query_len, num_shared, num_unique, min(largest.num_logits, query_len))

    def build(self, limits: StepLimits, cost: CostFunction) -> tuple[BatchShape, ...]:
        """Return the thinned grid of every reachable phase, and missing decode-only buckets."""
        families: dict[Phase, list[BatchShape]] = {}
        for phase in limits.reachable_phases:
            family = replace(phase, unique=True) if self.merge_unique else phase
            families.setdefault(family, []).extend(self.grid(limits, phase))
        buckets = [bucket for shapes in families.values() for bucket in thin(shapes, cost, self.slack)]
        return (*buckets, *decode_only_buckets(buckets, limits, cost))


def thin(shapes: Iterable[BatchShape], cost: CostFunction, slack: float) -> tuple[BatchShape, ...]:
    """Drop each shape that another one can replace, which holds it and costs at most ``slack`` times as much.

    In order of descending cost, so a shape that holds all others stays, and every dropped shape has a
    replacement in the result.
    """
    shapes = tuple(set(shapes))
    ordered = sorted(zip(price(cost, to_levels(shapes)), shapes, strict=True), reverse=True)
    costs, levels = np.array([each for each, _ in ordered]), to_levels(shape for _, shape in ordered)
    kept: list[int] = []
    for i in range(len(ordered)):
        holds = (levels[kept] >= levels[i]).all(axis=1)
        affordable = costs[kept] <= slack * costs[i]
        if not (holds & affordable).any():
            kept.append(i)
    return tuple(ordered[i][1] for i in kept)


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

    An immutable value: two tables with equal buckets and cost are equal.

    Args:
        buckets: in any order, repeats allowed; stored sorted and unique.
        cost: ranks the buckets that hold a shape; ties go to the smaller bucket.
        planned_padding: padding that it was planned for; None if unknown.
        draft_lens: see ``StepLimits``; a step then fits no bucket with shorter rows. () = all are equal.
    """

    buckets: tuple[BatchShape, ...]
    cost: CostFunction = field(default_factory=StepCost)
    planned_padding: PlannedPadding | None = field(default=None, compare=False)
    draft_lens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", tuple(sorted(set(self.buckets))))

    @classmethod
    def from_strings(cls, texts: Iterable[str], cost: CostFunction | None = None) -> BucketTable:
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
    ) -> BucketTable:
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

    def with_drafts(self, draft_lens: Sequence[int]) -> BucketTable:
        """Return this table plus a bucket with longer rows for each bucket of decodes only and each size.

        Args:
            draft_lens: see ``StepLimits``.
        """
        lens = tuple(draft_lens)
        shortest = [
            bucket
            for bucket in self.buckets
            if bucket.phase.unique and not bucket.phase.causal and row_len(bucket, 1, lens) == lens[0]
        ]
        longer = [
            replace(bucket, query_len=bucket.num_logits * each) for bucket in shortest for each in lens[1:]
        ]
        return replace(self, buckets=(*self.buckets, *longer), draft_lens=lens)

    def with_buckets(self, shapes: Iterable[BatchShape]) -> BucketTable:
        """Return this table plus ``shapes``."""
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
        holds = (self._levels >= wanted).all(axis=0)
        if self.draft_lens:
            holds &= self._row_lens >= row_len(shape, 1, self.draft_lens)
        held_by = np.flatnonzero(holds)
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

    @cached_property
    def _row_lens(self) -> np.ndarray:
        """int64 [buckets], tokens of a decode row in each, cheapest bucket first."""
        return np.array([row_len(bucket, 1, self.draft_lens) for bucket in self.by_cost], dtype=np.int64)

    def _check_not_empty(self) -> None:
        if not self.buckets:
            raise ValueError("expected a table with at least one bucket, got an empty one")
