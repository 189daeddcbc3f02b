"""Choose a bucket table for limits, a cost, a budget and traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np

from graphs.limits import StepLimits
from graphs.planner.cells import cheapest
from graphs.planner.evaluation import Blur, Traffic, check_within, smoothed
from graphs.planner.search import Resolution, TableSearch
from graphs.prices import price, to_levels, to_shapes
from graphs.shape import BatchShape, CostFunction, StepCost
from graphs.table import BucketTable, decode_only_buckets

FINE = Resolution()

RECORDED = Blur(share=0.2, spread=1.5, neighbours=1)
"""Blur of recorded traffic: future steps are similar to recorded ones, and seldom equal."""

ASSUMED = Blur(share=0.5, spread=2.0, neighbours=1)
"""Blur of assumed traffic, which may differ more from that of the users."""


@dataclass(frozen=True)
class GraphBudget:
    """Bounds on the capture of a table.

    Args:
        num_graphs: buckets, at least 1.
        seconds, seconds_per_graph: warm-up time, and that of one graph; both or neither.
        memory_bytes, bytes_of: memory of all graphs, and that of the graph of a shape; both or neither.

    Raises:
        ValueError: a value that is not positive, or a limit without its estimate.
    """

    num_graphs: int
    seconds: float | None = None
    seconds_per_graph: float | None = None
    memory_bytes: float | None = None
    bytes_of: Callable[[BatchShape], float] | None = None

    def __post_init__(self) -> None:
        if self.num_graphs < 1:
            raise ValueError(f"expected a budget of at least 1 graph, got {self.num_graphs}")
        for limit, estimate in (("seconds", "seconds_per_graph"), ("memory_bytes", "bytes_of")):
            if (getattr(self, limit) is None) != (getattr(self, estimate) is None):
                raise ValueError(f"expected {limit} and {estimate} together, got only one of them")
        for name in ("seconds", "seconds_per_graph", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"expected {name} above 0, got {value}")

    @property
    def most_graphs(self) -> int:
        """Graphs that fit the count and the time.

        Raises:
            ValueError: the time does not suffice for one graph.
        """
        if self.seconds is None or self.seconds_per_graph is None:
            return self.num_graphs
        if self.seconds < self.seconds_per_graph:
            raise ValueError(
                f"a budget of {self.seconds:g} s does not hold the smallest table: one graph takes "
                f"{self.seconds_per_graph:g} s"
            )
        return min(self.num_graphs, int(self.seconds / self.seconds_per_graph))

    @classmethod
    def of(cls, budget: GraphBudget | int) -> GraphBudget:
        """Return a budget, created from a number of graphs if needed."""
        return cls(budget) if isinstance(budget, int) else budget

    def check_holds(self, largest: BatchShape) -> None:
        """Raise ValueError unless the smallest table fits, whose only bucket is the largest shape."""
        _ = self.most_graphs
        short = self.bytes_short((largest,))
        if short:
            raise ValueError(
                f"a budget of {self.memory_bytes:.0f} bytes does not hold the smallest table: the graph of "
                f"{largest} alone takes {short:.0f} bytes more"
            )

    def bytes_short(self, buckets: tuple[BatchShape, ...]) -> float:
        """Bytes by which the graphs of these buckets exceed the memory; 0 when they fit."""
        if self.memory_bytes is None or self.bytes_of is None:
            return 0.0
        return max(0.0, sum(map(self.bytes_of, buckets)) - self.memory_bytes)


def plan_table(
    limits: StepLimits,
    budget: GraphBudget | int,
    traffic: Traffic,
    cost: CostFunction | None = None,
    *,
    blur: Blur = RECORDED,
    worst_case: float = 0.5,
    cover_share: float = 0.2,
    resolution: Resolution = FINE,
) -> BucketTable:
    """Choose the buckets that pad the traffic least, within a budget, and hold every reachable shape.

    The method and bounds of its distance from the optimum: ``TableSearch``. Every reachable shape lies in a
    cell, and every cell below some bucket; no bucket exceeds ``limits.largest``.

    Args:
        budget: an int is a number of graphs.
        traffic: shapes, recorded or assumed, with weights.
        cost: default ``StepCost(block_size=limits.block_size)``.
        blur: expected difference between this and future traffic.
        worst_case: target bound for the padding of a step, relative to its cost.
        cover_share: share of the budget for the bound of shapes that are not in the traffic.
        resolution: finer is slower and pads less.

    Raises:
        ValueError: the budget is too small for the smallest table, which is one bucket that holds everything;
            the traffic is not reachable within the limits; or a share or bound is out of range.
    """
    budget = GraphBudget.of(budget)
    if worst_case <= 0 or not 0 < cover_share <= 1:
        raise ValueError(
            f"expected worst_case > 0 and 0 < cover_share <= 1, got {worst_case} and {cover_share}"
        )
    cost = cost or StepCost(block_size=limits.block_size)
    check_within(limits, traffic)
    budget.check_holds(limits.largest)
    if budget.most_graphs == 1:
        return BucketTable((limits.largest,), cost)
    smallest = _smallest(limits)
    if budget.most_graphs < len(smallest):
        return BucketTable(smallest[: budget.most_graphs], cost)
    blurred = smoothed(limits, traffic, blur)
    search = TableSearch(limits, cost, blurred, traffic, worst_case, resolution)

    def find(num_buckets: int, *, is_draft: bool = False) -> tuple[BatchShape, ...]:
        return _with_decode_only_buckets(limits, cost, search, num_buckets, cover_share, is_draft)

    return BucketTable(_within(budget, limits, find), cost)


def _smallest(limits: StepLimits) -> tuple[BatchShape, ...]:
    """A bucket for steps with prompts, one for decodes alone, one for decodes with shared blocks.

    Together they hold every step, and decodes run no unused part; without the last one decodes with shared
    blocks run in the first.
    """
    largest = [limits.largest_of(phase) for phase in limits.reachable_phases]
    prompts = [shape for shape in largest if shape.phase.causal]
    decodes = [shape for shape in largest if not shape.phase.causal]
    return (*([reduce(or_, prompts)] if prompts else []), *sorted(decodes))


def _with_decode_only_buckets(
    limits: StepLimits,
    cost: CostFunction,
    search: TableSearch,
    num_buckets: int,
    cover_share: float,
    is_draft: bool,
) -> tuple[BatchShape, ...]:
    """The best table with a number of buckets in which decode-only steps run no other parts."""
    room, tries_draft = num_buckets, True
    while True:
        found = to_shapes(search.find(room, cover_share, is_draft=is_draft or tries_draft))
        twins = decode_only_buckets(found, limits, cost)
        excess = len(found) + len(twins) - num_buckets
        if excess > 0 and room > search.fewest:
            # A draft lacks about as many decode-only buckets as the final table.
            room = max(search.fewest, room - excess)
        elif tries_draft and not is_draft:
            tries_draft = False
        else:
            return (*found, *twins)


def _within(
    budget: GraphBudget, limits: StepLimits, find: Callable[..., tuple[BatchShape, ...]]
) -> tuple[BatchShape, ...]:
    """The largest table that fits the count and the memory."""
    most = budget.most_graphs
    buckets = find(most)
    if not budget.bytes_short(buckets):
        return buckets
    fitting: tuple[BatchShape, ...] = (limits.largest,)
    fits, fails = 1, most
    while fails - fits > 1:
        middle = (fits + fails) // 2
        buckets = find(middle, is_draft=True)
        if budget.bytes_short(buckets):
            fails = middle
        else:
            fitting, fits = buckets, middle
    buckets = find(fits) if fits > 1 else fitting
    return fitting if budget.bytes_short(buckets) else buckets


def or_default(planned: BucketTable, budget: GraphBudget, limits: StepLimits, others: Traffic) -> BucketTable:
    """A planned table, or the default one where that fits the budget and costs less.

    Args:
        others: traffic to compare both on; not the one that was planned for.
    """
    default = BucketTable.exponential(limits, cost=planned.cost)
    if len(default) > budget.most_graphs or budget.bytes_short(default.buckets):
        return planned
    levels, weight = to_levels(others), np.array(list(others.values()))

    def spent(table: BucketTable) -> float:
        buckets = to_levels(table.buckets)
        prices = price(table.cost, buckets)
        return float(weight @ prices[cheapest(buckets, prices, levels)])

    return min(planned, default, key=spent)
