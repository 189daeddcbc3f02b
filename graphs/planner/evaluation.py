"""Padding of a table: on traffic, and at worst."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphs.cost import BroadcastCost, CostFunction
from graphs.limits import StepLimits
from graphs.planner.cells import grid_cells, lowest_of
from graphs.planner.levels import (
    LOGITS,
    QUERY,
    SHARED,
    UNIQUE,
    Floats,
    Levels,
    cheapest,
    price,
    to_levels,
)
from graphs.planner.strategies import Grid
from graphs.planner.traffic import Traffic
from graphs.shape import BatchShape, Phase
from graphs.table import BucketTable


@dataclass(frozen=True)
class PaddingReport:
    """Excess cost of steps in a table over their exact shapes.

    Attributes:
        num_buckets: buckets of the table.
        mean: cost of the padded traffic over its exact cost, minus 1; missed steps left out.
        worst: the largest padding of one step of the traffic, relative to its cost.
        worst_reachable: the same over every shape that the limits make reachable and a bucket holds.
        missed: share of the steps that no bucket holds.
        holds_all: whether every reachable shape has a bucket.
    """

    num_buckets: int
    mean: float
    worst: float
    worst_reachable: float
    missed: float
    holds_all: bool


def mean_padding(table: BucketTable, traffic: Traffic) -> float:
    """The mean cost of steps padded to a table over that of exact ones, minus 1; missed steps left out."""
    exact, buckets = to_levels(traffic), to_levels(table.buckets)
    weight = np.array(list(traffic.values()), dtype=np.float64)
    prices = price(table.cost, buckets)
    found = cheapest(buckets, prices, exact)
    is_held = found >= 0
    own = (weight * price(table.cost, exact))[is_held].sum()
    return float((weight * prices[found])[is_held].sum() / own - 1) if own else 0.0


def evaluate(
    buckets: tuple[BatchShape, ...] | Grid, limits: StepLimits, cost: CostFunction, traffic: Traffic
) -> PaddingReport:
    """Measure a table, exactly: steps go to the cheapest bucket that holds them.

    The bucket of a shape depends only on where its sizes lie between those of the buckets. So the worst
    reachable shape is the smallest one of some box between neighbouring sizes, and all boxes are tried.
    """
    exact = to_levels(traffic)
    weight = np.array(list(traffic.values()), dtype=np.float64)
    if isinstance(buckets, Grid):
        padded, is_held = buckets.pad(exact), np.ones(len(exact), dtype=np.bool_)
        worst_reachable, holds_all = _worst_of_grid(buckets, limits, cost), True
    else:
        levels = to_levels(buckets)
        prices = price(cost, levels)
        found = cheapest(levels, prices, exact)
        padded, is_held = levels[found], found >= 0
        worsts = [_worst_of_table(levels, prices, limits, cost, phase) for phase in limits.reachable_phases]
        worst_reachable, holds_all = max(worst for worst, _ in worsts), all(holds for _, holds in worsts)
    own = price(cost, exact)
    ratio = price(cost, padded) / own
    spent = (weight * own)[is_held]
    return PaddingReport(
        len(buckets),
        float((ratio[is_held] * spent).sum() / spent.sum() - 1) if is_held.any() else 0.0,
        float(ratio[is_held].max(initial=1.0) - 1),
        float(worst_reachable - 1),
        float(weight[~is_held].sum() / weight.sum()),
        holds_all,
    )


def _worst_of_grid(grid: Grid, limits: StepLimits, cost: CostFunction) -> float:
    """The largest cost of a padded shape over its own."""
    worst = 1.0
    for phase, sizes in grid.sizes.items():
        for lowest, _ in grid_cells(_with_rows(grid, limits, sizes), limits, phase):
            if len(lowest):
                worst = max(worst, float((price(cost, grid.pad(lowest)) / price(cost, lowest)).max()))
    return worst


def _worst_of_table(
    buckets: Levels, prices: Floats, limits: StepLimits, cost: CostFunction, phase: Phase
) -> tuple[float, bool]:
    """The same for a list of buckets, and whether it holds every reachable shape of a phase.

    For each query size the cheapest bucket of every box is found by running minima, along one size after
    another.
    """
    axes = {column: np.unique(buckets[:, column]) for column in (QUERY, SHARED, UNIQUE, LOGITS)}
    runs = (buckets[:, :QUERY] >= [phase.causal, phase.shared, phase.unique]).all(axis=1)
    buckets, prices = buckets[runs], prices[runs]
    edges = {column: _edges(axes[column], column, limits, phase) for column in axes}
    sizes = (SHARED, UNIQUE, LOGITS)
    # The last box of each axis that a bucket holds; -1 = none.
    place = {
        column: np.searchsorted(edges[column][1], buckets[:, column], side="right") - 1 for column in axes
    }
    worst, holds_all = 1.0, True
    shape = tuple(len(edges[column][0]) for column in sizes)
    s_low, u_low, n_low = (edges[column][0] for column in sizes)
    n_high = edges[LOGITS][1]
    for number, (q_low, q_high) in enumerate(zip(*edges[QUERY])):
        least = np.full(shape, np.inf)
        rows = (place[QUERY] >= number) & np.all([place[column] >= 0 for column in sizes], axis=0)
        np.minimum.at(least, tuple(place[column][rows] for column in sizes), prices[rows])
        for axis in range(len(sizes)):
            least = np.flip(np.minimum.accumulate(np.flip(least, axis), axis=axis), axis)
        if phase.causal:
            query, logits, exists = np.maximum(q_low, n_low), n_low, n_low <= q_high
        else:
            fewest = -(-q_low // limits.decode_len)
            query, logits, exists = np.full_like(n_low, q_low), np.maximum(n_low, fewest), fewest <= n_high
        if not exists.any():
            continue
        own = _prices_of(cost, phase, query[exists], s_low, u_low, logits[exists])
        ratio = least[:, :, exists] / own
        is_held = np.isfinite(ratio)
        holds_all = holds_all and bool(is_held.all())
        worst = max(worst, float(ratio[is_held].max(initial=1.0)))
    return worst, holds_all


def _edges(axis: Levels, column: int, limits: StepLimits, phase: Phase) -> tuple[Levels, Levels]:
    """Lowest and highest size of the boxes between the sizes of buckets, up to the limits."""
    low, largest = lowest_of(limits, phase)[column - QUERY], limits.largest_of(phase).levels[column]
    high = np.append(axis[(axis >= low) & (axis < largest)], largest)
    return np.append(low, high[:-1] + 1), high


def _prices_of(
    cost: CostFunction, phase: Phase, query: Levels, shared: Levels, unique: Levels, logits: Levels
) -> Floats:
    """The cost of every combination, float64 ``[shared, unique, logits]``; query sizes go with logit rows."""
    if isinstance(cost, BroadcastCost):
        sizes = (query[None, None], shared[:, None, None], unique[None, :, None], logits[None, None])
        return np.asarray(cost.at(phase, *(size.astype(np.float64) for size in sizes)))
    grid = np.stack(np.meshgrid(shared, unique, np.arange(len(logits)), indexing="ij"), axis=-1).reshape(
        -1, 3
    )
    levels = np.empty((len(grid), 7), dtype=np.int64)
    levels[:, :QUERY] = [phase.causal, phase.shared, phase.unique]
    levels[:, QUERY], levels[:, LOGITS] = query[grid[:, 2]], logits[grid[:, 2]]
    levels[:, SHARED], levels[:, UNIQUE] = grid[:, 0], grid[:, 1]
    return price(cost, levels).reshape(len(shared), len(unique), len(logits))


def _with_rows(grid: Grid, limits: StepLimits, sizes: tuple[Levels, Levels, Levels]) -> dict[int, Levels]:
    query, shared, unique = sizes
    rows = np.minimum(query, limits.max_num_seqs)
    return {QUERY: query, SHARED: shared, UNIQUE: unique, LOGITS: np.unique(rows)}
