"""The padding of a table on traffic and at worst, and bucket strategies of other projects to compare with.

The strategies of vllm-gaudi 0.26, the unified one apart, have buckets ``(batch, query, context)`` of prompts
and of decodes; here the same rule chooses the sizes of every dimension, and the table is their product for
each phase. Logit rows follow the query size up to ``max_num_seqs``, as in ``ExponentialRule``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from graphs.limits import StepLimits
from graphs.planner.cells import LOGITS, SHARED, UNIQUE, cheapest, lowest_of, reachable_corners
from graphs.planner.evaluation import Traffic
from graphs.prices import QUERY, Floats, Levels, price, to_levels
from graphs.shape import BatchShape, BroadcastCost, CostFunction, Phase

_UNIFIED_POINTS = 10


@dataclass(frozen=True)
class Grid:
    """Every combination of some sizes, for each phase; often too many to list.

    Attributes:
        sizes: for each reachable phase the ascending sizes of Q, NS and NU, the last of each at its limit.
        max_num_seqs: most logit rows.
    """

    sizes: dict[Phase, tuple[Levels, Levels, Levels]]
    max_num_seqs: int

    def __len__(self) -> int:
        return sum(math.prod(map(len, sizes)) for sizes in self.sizes.values())

    def buckets(self) -> tuple[BatchShape, ...]:
        """List all combinations."""
        return tuple(
            BatchShape(phase, int(q), int(s), int(u), min(int(q), self.max_num_seqs))
            for phase, sizes in self.sizes.items()
            for q, s, u in product(*sizes)
        )

    def pad(self, levels: Levels) -> Levels:
        """The bucket of each reachable shape, int64 ``[n, 7]``: every size rounded up, in its own phase."""
        padded = levels.copy()
        for phase, sizes in self.sizes.items():
            rows = np.flatnonzero(
                (levels[:, :QUERY] == [phase.causal, phase.shared, phase.unique]).all(axis=1)
            )
            needed = levels[rows].copy()
            # Rows that are missing between decodes need a bucket with as many tokens.
            needed[:, QUERY] = np.maximum(needed[:, QUERY], needed[:, LOGITS])
            for column, points in zip((QUERY, SHARED, UNIQUE), sizes):
                padded[rows, column] = points[np.searchsorted(points, needed[:, column])]
            padded[rows, LOGITS] = np.minimum(padded[rows, QUERY], self.max_num_seqs)
        return padded


def exponential(limits: StepLimits) -> Grid:
    """Powers of two, up to each limit."""
    return _grid(limits, lambda low, step, high: _powers(low, high))


def linear(limits: StepLimits) -> Grid:
    """Powers of two up to a step, then multiples of it: ``block_size`` for tokens and unique blocks, 2 for
    gathered blocks, 32 for rows."""
    return _grid(limits, lambda low, step, high: _with_padding_limits(low, step, high, 0, high))


def padding_aware(limits: StepLimits, percent: int = 25) -> Grid:
    """The linear sizes, without those whose absence pads by at most ``percent`` of the next size and by at
    most a quarter of the largest."""
    return _grid(
        limits, lambda low, step, high: _with_padding_limits(low, step, high, percent, -(-high // 4))
    )


def upstream_unified(limits: StepLimits) -> tuple[BatchShape, ...]:
    """The table of vllm-gaudi's unified attention before its removal (#1226).

    Ten exponential points from 1 to the limit for query tokens, gathered blocks (those of one request at
    most) and unique blocks, all but the last rounded up to a multiple of ``max_num_seqs``, and 0 for blocks;
    filtered as there, and always ``max_num_seqs`` logit rows. A part of size 0 is left out of the phase.
    """
    seqs = limits.max_num_seqs
    shared_limit = min(limits.blocks_per_request, limits.num_blocks)
    buckets = []
    for query, shared, unique, causal in product(
        _unified_points(1, limits.max_num_batched_tokens, seqs),
        _unified_points(0, shared_limit, seqs),
        _unified_points(0, limits.num_blocks, seqs),
        (False, True),
    ):
        shared_tokens = shared * limits.block_size
        if causal:
            is_kept = shared_tokens // min(seqs, query) <= limits.max_model_len
        else:
            rows = max(1, query // 2)
            is_kept = query <= seqs and (shared > 0 or query <= unique) and (shared > 0 or unique > 0)
            is_kept = is_kept and (shared == 0 or shared_tokens // rows <= limits.max_model_len)
        if is_kept:
            phase = Phase(causal, shared > 0, unique > 0)
            buckets.append(BatchShape(phase, query, shared, unique, seqs))
    return tuple(buckets)


def _unified_points(low: int, high: int, multiple: int) -> list[int]:
    first = max(low, 1)
    steps = [first * (high / first) ** (i / (_UNIFIED_POINTS - 1)) for i in range(_UNIFIED_POINTS - 1)]
    points = {math.ceil(step / multiple) * multiple for step in steps} | {high}
    return sorted(points | {0} if low == 0 else points)


def _grid(limits: StepLimits, points: Callable[[int, int, int], Levels]) -> Grid:
    sizes = {}
    for phase in limits.reachable_phases:
        largest = limits.largest_of(phase)
        low, step = (limits.block_size, limits.block_size) if phase.causal else (1, 32)
        sizes[phase] = (
            points(min(low, largest.query_len), step, largest.query_len),
            points(0, 2, largest.num_shared_blocks),
            points(0, limits.block_size, largest.num_unique_blocks),
        )
    return Grid(sizes, limits.max_num_seqs)


def _powers(low: int, high: int) -> Levels:
    points = {low, high}
    size = max(low, 1)
    while size < high:
        points.add(size)
        size *= 2
    return np.array(sorted(points), dtype=np.int64)


def _with_padding_limits(low: int, step: int, high: int, percent: int, most: int) -> Levels:
    """Doubling up to ``step``, then multiples of it, without those whose absence pads the next by at most
    ``percent`` of it and by at most ``most``."""
    points = [point for point in _powers(low, min(step, high)).tolist() if point <= high]
    multiple = (points[-1] // step + 1) * step
    while multiple < high:
        following = min(multiple + step, high)
        padding = following - points[-1] - 1
        if padding * 100 > percent * following or padding > most:
            points.append(multiple)
        multiple += step
    return np.array(sorted({*points, high}), dtype=np.int64)


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
        for lowest, _ in _grid_cells(_with_rows(grid, limits, sizes), limits, phase):
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


def _grid_cells(axes: dict[int, Levels], limits: StepLimits, phase: Phase) -> Iterator[tuple[Levels, Levels]]:
    """Boxes between neighbouring sizes on given axes, some at a time.

    Args:
        axes: ascending sizes of each of the columns Q, NS, NU and N; boxes end at each of them and at
            the limits.
    """
    lowest, largest = lowest_of(limits, phase), limits.largest_of(phase).levels
    highs, lows = [], []
    for column, low in zip((QUERY, SHARED, UNIQUE, LOGITS), lowest):
        inside = axes[column][(axes[column] >= low) & (axes[column] < largest[column])]
        high = np.concatenate([inside, [largest[column]]])
        highs.append(high)
        lows.append(np.concatenate([[low], inside + 1]))
    letters = np.array(largest[:QUERY], dtype=np.int64)
    for low_query, high_query in zip(lows[0], highs[0]):
        box_high = _product(letters, [np.array([high_query]), *highs[1:]])
        box_low = _product(letters, [np.array([low_query]), *lows[1:]])
        box_low, box_high, is_reachable = reachable_corners(box_low, box_high, limits.decode_len)
        yield box_low[is_reachable], box_high[is_reachable]


def _product(letters: Levels, columns: list[Levels]) -> Levels:
    grid = np.stack(np.meshgrid(*columns, indexing="ij"), axis=-1).reshape(-1, len(columns))
    return np.concatenate([np.broadcast_to(letters, (len(grid), QUERY)), grid], axis=1)
