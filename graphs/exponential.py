"""A modest default table: sizes that grow geometrically, thinned by cost."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from graphs.cost import CostFunction
from graphs.decode_twins import decode_twins
from graphs.limits import StepLimits
from graphs.shape import BatchShape, Phase


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
        merge_unique: let a bucket with an empty unique part replace one without that part, which pays where
            a part without work costs next to nothing.

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
        """Return the thinned grid of every reachable phase, and what decodes alone lack besides."""
        families: dict[Phase, list[BatchShape]] = {}
        for phase in limits.reachable_phases:
            family = replace(phase, unique=True) if self.merge_unique else phase
            families.setdefault(family, []).extend(self.grid(limits, phase))
        buckets = [bucket for shapes in families.values() for bucket in thin(shapes, cost, self.slack)]
        return (*buckets, *decode_twins(buckets, limits, cost))


def thin(shapes: Iterable[BatchShape], cost: CostFunction, slack: float) -> tuple[BatchShape, ...]:
    """Drop each shape that a kept one can replace: it holds the shape and costs at most ``slack`` times it.

    Goes from the most expensive shape to the cheapest, so a shape that holds all others is always kept,
    and every dropped shape has its replacement among the kept.
    """
    priced = sorted(((cost(shape), shape) for shape in set(shapes)), reverse=True)
    costs = np.array([price for price, _ in priced])
    levels = np.array([shape.levels for _, shape in priced], dtype=np.int64)
    kept: list[int] = []
    for i in range(len(priced)):
        holds = (levels[kept] >= levels[i]).all(axis=1)
        affordable = costs[kept] <= slack * costs[i]
        if not (holds & affordable).any():
            kept.append(i)
    return tuple(priced[i][1] for i in kept)
