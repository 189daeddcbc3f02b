"""Bucket strategies of other projects, restated for batch shapes, for comparison.

The strategies of vllm-gaudi 0.26, the unified one apart, have buckets ``(batch, query, context)`` of prompts
and of decodes; here the same rule chooses the sizes of every dimension, and the table is their product for
each phase. Logit rows follow the query size up to ``max_num_seqs``, as in ``ExponentialRule``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from graphs.limits import StepLimits
from graphs.planner.cells import LOGITS, QUERY, SHARED, UNIQUE, Levels
from graphs.shape import BatchShape, Phase

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
