"""Choose a bucket table for limits, a cost, a budget and traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphs.cost import CostFunction, StepCost
from graphs.limits import BucketLimits
from graphs.planner.cells import Cells
from graphs.planner.levels import to_shapes
from graphs.planner.search import TableSearch
from graphs.planner.traffic import Prototypes, Traffic, check_within, prior, smoothed
from graphs.shape import BatchShape
from graphs.table import BucketTable


@dataclass(frozen=True)
class Resolution:
    """How closely shapes are looked at.

    Args:
        num_cells: boxes that the reachable shapes are cut into, about.
        num_points: rows that the traffic is gathered in, about.
    """

    num_cells: int = 4000
    num_points: int = 800


COARSE = Resolution(1000, 300)
"""A tenth of the time, for when the size of a table matters more than its padding."""


@dataclass(frozen=True)
class GraphBudget:
    """What capturing the table may cost.

    Args:
        num_graphs: buckets, at least 1.
        seconds, seconds_per_graph: warm-up time, and what one graph takes of it; both or neither.
        memory_bytes, bytes_of: memory of all graphs, and what the graph of a shape takes of it; both or
            neither.

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

    def bytes_short(self, buckets: tuple[BatchShape, ...]) -> float:
        """By how many bytes the graphs of these buckets exceed the memory; 0 when they fit."""
        if self.memory_bytes is None or self.bytes_of is None:
            return 0.0
        return max(0.0, sum(map(self.bytes_of, buckets)) - self.memory_bytes)


def plan_table(
    limits: BucketLimits,
    budget: GraphBudget | int,
    cost: CostFunction | None = None,
    traffic: Traffic | None = None,
    *,
    worst_case: float = 0.5,
    cover_share: float = 0.2,
    resolution: Resolution = Resolution(),
) -> BucketTable:
    """Choose the buckets that pad the traffic least, within a budget, and hold every reachable shape.

    The method and what is known about its distance from the optimum: ``TableSearch``. Every reachable
    shape lies in a cell, and every cell below some bucket; no bucket exceeds ``limits.largest``.

    Args:
        budget: an int is a number of graphs.
        cost: default ``StepCost(block_size=limits.block_size)``.
        traffic: recorded shapes and how often each occurs; three tenths of their weight go to shapes
            nearby (``smoothed``). None plans for ``prior(limits)``.
        worst_case: padding of a step, relative to its cost, that is aimed at.
        cover_share: share of the budget that may go into the bound for shapes that are not in the traffic.
        resolution: finer takes longer and pads less.

    Raises:
        ValueError: the budget does not hold the smallest table, which is one bucket that holds everything;
            the traffic is not reachable within the limits; or a share or bound is out of range.
    """
    if isinstance(budget, int):
        budget = GraphBudget(budget)
    if worst_case <= 0 or not 0 < cover_share <= 1:
        raise ValueError(
            f"expected worst_case > 0 and 0 < cover_share <= 1, got {worst_case} and {cover_share}"
        )
    cost = cost or StepCost(block_size=limits.block_size)
    if traffic is None:
        traffic = prior(limits)
    else:
        check_within(limits, traffic)
        traffic = smoothed(limits, traffic)
    most = budget.most_graphs
    short = budget.bytes_short((limits.largest,))
    if short:
        raise ValueError(
            f"a budget of {budget.memory_bytes:.0f} bytes does not hold the smallest table: the graph of "
            f"{limits.largest} alone takes {short:.0f} bytes more"
        )
    if most == 1:
        return BucketTable((limits.largest,), cost)
    cells = Cells.within(limits, cost, resolution.num_cells)
    search = TableSearch(cells, Prototypes.of(traffic, cost, resolution.num_points), cost)

    def buckets_of(num_graphs: int) -> tuple[BatchShape, ...]:
        return to_shapes(search.find(num_graphs, worst_case, cover_share).buckets)

    buckets = buckets_of(most)
    if not budget.bytes_short(buckets):
        return BucketTable(buckets, cost)
    # The graph count that fits the memory, between one that fits and one that does not.
    fitting: tuple[BatchShape, ...] = (limits.largest,)
    fits, fails = 1, most
    while fails - fits > 1:
        middle = (fits + fails) // 2
        buckets = buckets_of(middle)
        if budget.bytes_short(buckets):
            fails = middle
        else:
            fitting, fits = buckets, middle
    return BucketTable(fitting, cost)
