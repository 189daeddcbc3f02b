"""Traffic, and the padding of a table on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from graphs.limits import StepLimits
from graphs.planner.cells import SHARED, UNIQUE, cheapest, lowest_of
from graphs.prices import QUERY, Floats, Levels, price, to_levels
from graphs.shape import BatchShape, CostFunction
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


def mean_padding(table: BucketTable, traffic: Traffic) -> float:
    """The mean cost of steps padded to a table over that of exact ones, minus 1, without missed steps."""
    exact, buckets = to_levels(traffic), to_levels(table.buckets)
    weight = np.array(list(traffic.values()), dtype=np.float64)
    prices = price(table.cost, buckets)
    found = cheapest(buckets, prices, exact)
    is_held = found >= 0
    own = (weight * price(table.cost, exact))[is_held].sum()
    return float((weight * prices[found])[is_held].sum() / own - 1) if own else 0.0
