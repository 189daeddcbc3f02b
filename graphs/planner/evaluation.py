"""Traffic, and the padding of a table on it and at worst."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from graphs.limits import StepLimits
from graphs.planner.cells import (
    LOGITS,
    QUERY,
    SHARED,
    UNIQUE,
    Floats,
    Levels,
    cheapest,
    grid_cells,
    lowest_of,
    price,
    to_levels,
)
from graphs.planner.strategies import Grid
from graphs.shape import BatchShape, BroadcastCost, CostFunction, Phase
from graphs.table import BucketTable

Traffic = Mapping[BatchShape, float]
"""Frequency of each exact shape, in any unit."""

_GROWTHS = tuple(2.0 ** (2 ** (i / 4) / 64) for i in range(33))


def halton(number: int, base: int) -> float:
    """Return an element, from 1 on, of the Halton sequence of a base: numbers spread evenly over [0, 1)."""
    value, digit = 0.0, 1.0
    while number:
        digit /= base
        value += digit * (number % base)
        number //= base
    return value


@dataclass(frozen=True)
class Blur:
    """Assumed difference between known and future traffic.

    Args:
        share: part of the weight of each shape that is moved to reachable shapes nearby.
        spread: largest factor between the sizes of a shape and of those nearby, drawn for each size.
        neighbours: number of shapes nearby for each shape.
    """

    share: float
    spread: float
    neighbours: int


def smoothed(limits: StepLimits, traffic: Traffic, blur: Blur) -> Traffic:
    """Move a share of traffic to reachable shapes nearby, so that a table does not overfit it."""
    found = {shape: weight * (1 - blur.share) for shape, weight in traffic.items()}
    for number, (shape, weight) in enumerate(sorted(traffic.items())):
        for neighbour in range(blur.neighbours):
            point = number * blur.neighbours + neighbour + 1
            factors = [blur.spread ** (2 * halton(point, base) - 1) for base in (2, 3, 5, 7)]
            near = _near(limits, shape, factors)
            found[near] = found.get(near, 0.0) + weight * blur.share / blur.neighbours
    return found


def _near(limits: StepLimits, shape: BatchShape, factors: list[float]) -> BatchShape:
    lowest, highest = lowest_of(limits, shape.phase), limits.largest_of(shape.phase).levels[QUERY:]
    sizes = [round(size * factor) for size, factor in zip(shape.levels[QUERY:], factors)]
    query_len, num_shared, num_unique, num_logits = (
        min(max(size, low), high) for size, low, high in zip(sizes, lowest, highest)
    )
    # The rows of decodes stay consistent with their tokens.
    fewest = -(-query_len // limits.decode_len)
    num_logits = min(num_logits, query_len) if shape.phase.causal else max(num_logits, fewest)
    return BatchShape(shape.phase, query_len, num_shared, num_unique, num_logits)


def check_within(limits: StepLimits, traffic: Traffic) -> None:
    """Raise ValueError for traffic that a scheduler within ``limits`` cannot produce.

    Raises:
        ValueError: no shape, a weight that is not positive, or a shape beyond the limits.
    """
    if not traffic:
        raise ValueError("expected traffic with at least one shape, got none")
    for shape, weight in traffic.items():
        if not weight > 0:
            raise ValueError(f"expected a positive weight for {shape}, got {weight}")
        if not limits.reaches(shape):
            raise ValueError(
                f"shape {shape} was recorded under other limits: it cannot occur within {limits}"
            )


@dataclass(frozen=True)
class Prototypes:
    """Traffic in few rows: each represents shapes that it holds and that are nearly as large.

    Attributes:
        levels: int64 ``[n, 7]``.
        weight: frequency, float64 ``[n]``, sum 1.
        floor: cost of the cheapest shape that a row represents, float64 ``[n]``.
    """

    levels: Levels
    weight: Floats
    floor: Floats

    @classmethod
    def of(cls, traffic: Traffic, cost: CostFunction, most: int = 800) -> Prototypes:
        """Group traffic into about ``most`` rows of shapes whose sizes round to the same powers of a growth.

        The growth is the smallest with few enough rows, up to a factor of 16.
        """
        levels = to_levels(traffic)
        weight = np.array(list(traffic.values()), dtype=np.float64)
        every = cls(levels, weight / weight.sum(), price(cost, levels))
        prototypes = every
        for growth in _GROWTHS:
            if len(prototypes.weight) <= most:
                break
            prototypes = _merged(every, growth)
        return prototypes

    def joins(self, cost: CostFunction) -> Levels:
        """Merge the rows two by two, the cheapest merge first; returns every join, int64 ``[2n - 1, 7]``.

        A merge costs the padding of both groups to their join, times their weights.
        """
        levels, weight = self.levels.copy(), self.weight.copy()
        own = price(cost, levels)
        made = [self.levels]
        loss = np.full((len(levels), len(levels)), np.inf)
        for row in range(len(levels) - 1):
            loss[row, row + 1 :] = _losses(row, np.arange(row + 1, len(levels)), levels, weight, own, cost)
        for _ in range(len(levels) - 1):
            kept, gone = np.unravel_index(int(loss.argmin()), loss.shape)
            levels[kept] = np.maximum(levels[kept], levels[gone])
            weight[kept] += weight[gone]
            own[kept] = price(cost, levels[kept : kept + 1])[0]
            loss[gone, :] = loss[:, gone] = np.inf
            weight[gone] = 0.0
            others = np.flatnonzero(weight)
            others = others[others != kept]
            losses = _losses(int(kept), others, levels, weight, own, cost)
            loss[np.minimum(kept, others), np.maximum(kept, others)] = losses
            made.append(levels[kept : kept + 1].copy())
        return np.unique(np.concatenate(made), axis=0)


def _losses(
    row: int, others: Levels, levels: Levels, weight: Floats, own: Floats, cost: CostFunction
) -> Floats:
    joined = price(cost, np.maximum(levels[row], levels[others]))
    return weight[row] * (joined - own[row]) + weight[others] * (joined - own[others])


def _merged(every: Prototypes, growth: float) -> Prototypes:
    levels = every.levels
    rounded = np.ceil(np.log(np.maximum(levels, 1)) / np.log(growth) - 1e-9).astype(np.int64)
    # Zero blocks and one block stay distinct: the part has no work, or some.
    rounded[:, [SHARED, UNIQUE]] -= levels[:, [SHARED, UNIQUE]] == 0
    rounded[:, :QUERY] = levels[:, :QUERY]
    _, group = np.unique(rounded, axis=0, return_inverse=True)
    group = group.reshape(-1)
    joined = np.zeros((group.max() + 1, levels.shape[1]), dtype=np.int64)
    np.maximum.at(joined, group, levels)
    floor = np.full(len(joined), np.inf)
    np.minimum.at(floor, group, every.floor)
    return Prototypes(joined, np.bincount(group, weights=every.weight).astype(np.float64), floor)


@dataclass(frozen=True)
class PaddingReport:
    """Excess cost of steps in a table over their exact shapes.

    Attributes:
        num_buckets: buckets of the table.
        mean: cost of the padded traffic over its exact cost, minus 1; without missed steps.
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
    """The mean cost of steps padded to a table over that of exact ones, minus 1, without missed steps."""
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
    """Measure a table exactly: steps run in the cheapest bucket that holds them.

    The bucket of a shape depends only on the intervals of its sizes between those of the buckets. So the
    worst reachable shape is the smallest one of some box between neighbouring sizes, and all boxes are tried.
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
