"""Weighted shapes: what a table is chosen for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from graphs.cost import CostFunction
from graphs.limits import BucketLimits
from graphs.planner.cells import lowest_of
from graphs.planner.levels import QUERY, SHARED, UNIQUE, Floats, Levels, price, to_levels
from graphs.shape import BatchShape, Phase

Traffic = Mapping[BatchShape, float]
"""How often each exact shape occurs, in any unit."""

_PRIOR_STEPS = {"--u": 0.60, "-su": 0.05, "c-u": 0.05, "csu": 0.20, "cs-": 0.05, "c--": 0.05}
_PRIOR_POINTS = 128
_GROWTHS = tuple(2.0 ** (i / 16) for i in range(1, 65))


def prior(limits: BucketLimits) -> dict[BatchShape, float]:
    """Stated guesses about traffic, for when none was recorded.

    Steps: 60 % decodes alone, 5 % decodes that share blocks, 20 % a chunk with context next to decodes, 5 %
    each a first chunk next to decodes, a chunk with context alone, and a first chunk alone; what the limits
    make unreachable is left out. Sizes are spread evenly on a logarithmic scale between the smallest and
    the limits, independently of each other, except that half of the steps with a causal part use up
    ``max_num_batched_tokens``, that logit rows of decodes are as many as their tokens, and that gathered
    context is at most that of one request per chunk row, and of one request for decodes.

    Returns:
        128 points a phase, of a Halton sequence, hence the same in every run.
    """
    found: dict[BatchShape, float] = {}
    for phase in limits.reachable_phases:
        weight = _PRIOR_STEPS[str(phase)] / _PRIOR_POINTS
        for number in range(_PRIOR_POINTS):
            shape = _prior_shape(limits, phase, number)
            found[shape] = found.get(shape, 0.0) + weight
    return found


def _prior_shape(limits: BucketLimits, phase: Phase, number: int) -> BatchShape:
    points = [_halton(number + 1, base) for base in (2, 3, 5, 7)]
    fewest, *_ = lowest_of(limits, phase)
    largest = limits.largest_of(phase)
    context = limits.blocks_per_request * (limits.max_chunk_rows if phase.causal else 1)
    query_len = _spread(fewest, largest.query_len, points[0])
    if phase.causal and number % 2:
        query_len = largest.query_len
    num_logits = query_len
    if phase.causal:
        num_logits = _spread(1, min(largest.num_logits, query_len), points[3])
    return BatchShape(
        phase,
        query_len,
        _spread(0, min(largest.num_shared_blocks, context), points[1]),
        _spread(0, largest.num_unique_blocks, points[2]),
        num_logits,
    )


def _halton(number: int, base: int) -> float:
    value, digit = 0.0, 1.0
    while number:
        digit /= base
        value += digit * (number % base)
        number //= base
    return value


def _spread(low: int, high: int, point: float) -> int:
    return min(high, round((low + 1) * ((high + 1) / (low + 1)) ** point) - 1)


def smoothed(limits: BucketLimits, traffic: Traffic, share: float = 0.3, spread: float = 1.5) -> Traffic:
    """Traffic of which a share goes to reachable shapes nearby.

    A recording shows some of the shapes that the same users will cause tomorrow. So that a table does not
    fit it too closely, each shape gives ``share`` of its weight to four neighbours, whose sizes are up to
    ``spread`` times larger or smaller, each by a factor of its own.
    """
    found = {shape: weight * (1 - share) for shape, weight in traffic.items()}
    for number, (shape, weight) in enumerate(sorted(traffic.items())):
        for neighbour in range(4):
            point = number * 4 + neighbour + 1
            near = _near(limits, shape, [spread ** (2 * _halton(point, base) - 1) for base in (2, 3, 5, 7)])
            found[near] = found.get(near, 0.0) + weight * share / 4
    return found


def _near(limits: BucketLimits, shape: BatchShape, factors: list[float]) -> BatchShape:
    lowest, highest = lowest_of(limits, shape.phase), limits.largest_of(shape.phase).levels[QUERY:]
    sizes = [round(size * factor) for size, factor in zip(shape.levels[QUERY:], factors)]
    query_len, num_shared, num_unique, num_logits = (
        min(max(size, low), high) for size, low, high in zip(sizes, lowest, highest)
    )
    # Logit rows of decodes stay above their tokens as far as they were.
    num_logits = min(num_logits, query_len) if shape.phase.causal else max(num_logits, query_len)
    return BatchShape(shape.phase, query_len, num_shared, num_unique, num_logits)


def check_within(limits: BucketLimits, traffic: Traffic) -> None:
    """Refuse traffic that a scheduler within ``limits`` cannot produce.

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
    """Traffic in few rows: each stands for shapes that it holds and that are nearly as large.

    Attributes:
        levels: int64 ``[n, 7]``.
        weight: how often, float64 ``[n]``, sum 1.
        floor: cost of the cheapest shape that a row stands for, float64 ``[n]``.
    """

    levels: Levels
    weight: Floats
    floor: Floats

    @classmethod
    def of(cls, traffic: Traffic, cost: CostFunction, most: int = 800) -> Prototypes:
        """At most about ``most`` rows: shapes whose sizes round to the same powers of a growth are one.

        The smallest growth that gives few enough rows is taken, up to a factor of 16.
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
        """Every join that merging the rows two by two makes, cheapest merge first: int64 ``[2n - 1, 7]``.

        A merge costs what padding both groups to their join adds, times how often they occur.
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
    # Zero blocks and one block are different things: the part has nothing to do, or something.
    rounded[:, [SHARED, UNIQUE]] -= levels[:, [SHARED, UNIQUE]] == 0
    rounded[:, :QUERY] = levels[:, :QUERY]
    _, group = np.unique(rounded, axis=0, return_inverse=True)
    group = group.reshape(-1)
    joined = np.zeros((group.max() + 1, levels.shape[1]), dtype=np.int64)
    np.maximum.at(joined, group, levels)
    floor = np.full(len(joined), np.inf)
    np.minimum.at(floor, group, every.floor)
    return Prototypes(joined, np.bincount(group, weights=every.weight).astype(np.float64), floor)
