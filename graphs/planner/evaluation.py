"""What a table costs: on traffic, and at worst."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from graphs.cost import CostFunction
from graphs.limits import BucketLimits
from graphs.planner.cells import grid_cells
from graphs.planner.levels import (
    LOGITS,
    QUERY,
    SHARED,
    UNIQUE,
    Bools,
    Floats,
    Levels,
    cheapest,
    price,
    to_levels,
)
from graphs.planner.strategies import Grid
from graphs.planner.traffic import Traffic
from graphs.shape import BatchShape


@dataclass(frozen=True)
class PaddingReport:
    """How much more steps cost in a table than at their exact shapes.

    Attributes:
        num_buckets: graphs to capture.
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


def evaluate(
    buckets: tuple[BatchShape, ...] | Grid, limits: BucketLimits, cost: CostFunction, traffic: Traffic
) -> PaddingReport:
    """Measure a table, exactly: steps go to the cheapest bucket that holds them.

    The bucket of a shape depends only on where its sizes lie between those of the buckets. So the worst
    reachable shape is the smallest one of some box between neighbouring sizes, and all boxes are tried.
    """
    pad: Callable[[Levels], tuple[Levels, Bools]]
    if isinstance(buckets, Grid):
        grid = buckets
        axes_of = {phase: _with_rows(grid, limits, sizes) for phase, sizes in grid.sizes.items()}

        def pad(levels: Levels) -> tuple[Levels, Bools]:
            return grid.pad(levels), np.ones(len(levels), dtype=np.bool_)

    else:
        levels = to_levels(buckets)
        prices = price(cost, levels)
        axes = {column: np.unique(levels[:, column]) for column in (QUERY, SHARED, UNIQUE, LOGITS)}
        axes_of = dict.fromkeys(limits.reachable_phases, axes)

        def pad(shapes: Levels) -> tuple[Levels, Bools]:
            found = cheapest(levels, prices, shapes)
            return levels[found], found >= 0

    exact = to_levels(traffic)
    weight = np.array(list(traffic.values()), dtype=np.float64)
    ratio, is_held = _ratios(exact, cost, pad)
    own = price(cost, exact)
    spent = (weight * own)[is_held]
    worst_reachable, holds_all = 0.0, True
    for phase in limits.reachable_phases:
        for lowest, _ in grid_cells(axes_of[phase], limits, phase):
            if len(lowest):
                ratios, held = _ratios(lowest, cost, pad)
                worst_reachable = max(worst_reachable, ratios[held].max(initial=1.0) - 1)
                holds_all = holds_all and bool(held.all())
    return PaddingReport(
        len(buckets),
        float((ratio[is_held] * spent).sum() / spent.sum() - 1) if is_held.any() else 0.0,
        float(ratio[is_held].max(initial=1.0) - 1),
        float(worst_reachable),
        float(weight[~is_held].sum() / weight.sum()),
        holds_all,
    )


def _ratios(
    shapes: Levels, cost: CostFunction, pad: Callable[[Levels], tuple[Levels, Bools]]
) -> tuple[Floats, Bools]:
    padded, is_held = pad(shapes)
    return price(cost, padded) / price(cost, shapes), is_held


def _with_rows(grid: Grid, limits: BucketLimits, sizes: tuple[Levels, Levels, Levels]) -> dict[int, Levels]:
    query, shared, unique = sizes
    rows = np.minimum(query, limits.max_num_seqs)
    return {QUERY: query, SHARED: shared, UNIQUE: unique, LOGITS: np.unique(rows)}
