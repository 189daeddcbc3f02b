"""Buckets without which decode-only steps would run parts that compute nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from graphs.cost import CostFunction
from graphs.limits import StepLimits
from graphs.shape import BatchShape, Phase


@dataclass(frozen=True)
class _Decodes:
    """The largest decode-only step that a bucket with more parts holds, and what that bucket costs."""

    shape: BatchShape
    ceiling: float


def decode_twins(
    buckets: Iterable[BatchShape], limits: StepLimits, cost: CostFunction
) -> tuple[BatchShape, ...]:
    """The buckets that a table lacks so that steps without prompts run their own parts, and no others.

    A step runs in the cheapest bucket that holds it. So the table needs, for each bucket that has more parts
    than some decodes, one with just their parts that is no dearer and holds as large decodes: exactly then
    all of them find such a bucket first. Buckets that are missing are joined while they stay cheap enough.

    Args:
        cost: by which the table finds buckets.
    """
    held = tuple(buckets)
    twins: list[BatchShape] = []
    # Twins of steps that share blocks hold steps that do not, so they come first.
    for phase in sorted(limits.reachable_phases, reverse=True):
        if not phase.causal:
            twins += _joined(_missing((*held, *twins), phase, limits, cost), cost)
    return tuple(twins)


def _joined(missing: Iterable[_Decodes], cost: CostFunction) -> Iterator[BatchShape]:
    left = sorted(missing, key=lambda each: (each.ceiling, each.shape))
    while left:
        first, *rest = left
        twin = first.shape
        for other in rest:
            # The first has the lowest ceiling.
            if cost(twin | other.shape) <= first.ceiling:
                twin |= other.shape
        yield twin
        left = [each for each in rest if not twin.holds(each.shape)]


def _missing(
    held: tuple[BatchShape, ...], phase: Phase, limits: StepLimits, cost: CostFunction
) -> Iterator[_Decodes]:
    own = [(bucket, cost(bucket)) for bucket in held if bucket.phase == phase]
    for bucket in held:
        shape = _decodes_in(bucket, phase, limits)
        if shape is None:
            continue
        ceiling = cost(bucket)
        if not any(price <= ceiling and other.holds(shape) for other, price in own):
            yield _Decodes(shape, ceiling)


def _decodes_in(bucket: BatchShape, phase: Phase, limits: StepLimits) -> BatchShape | None:
    """The join of all steps of a phase that a bucket of another one holds; None where it holds none."""
    if bucket.phase == phase or not bucket.phase.holds(phase) or not bucket.num_logits:
        return None
    largest = limits.largest_of(phase)
    num_logits = min(bucket.num_logits, largest.num_logits)
    return BatchShape(
        phase,
        min(bucket.query_len, num_logits * limits.decode_len),
        min(bucket.num_shared_blocks, largest.num_shared_blocks) if phase.shared else 0,
        min(bucket.num_unique_blocks, largest.num_unique_blocks),
        num_logits,
    )
