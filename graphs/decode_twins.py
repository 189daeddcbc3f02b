"""Buckets without which decode-only steps would run in buckets that have a causal part too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from graphs.cost import CostFunction
from graphs.limits import StepLimits
from graphs.shape import BatchShape, Phase


@dataclass(frozen=True)
class _Decodes:
    """The largest decode-only step that a bucket with a causal part holds, and what that bucket costs."""

    shape: BatchShape
    ceiling: float


def decode_twins(
    buckets: Iterable[BatchShape], limits: StepLimits, cost: CostFunction
) -> tuple[BatchShape, ...]:
    """The buckets that a table lacks so that no step without prompts runs a causal part in vain.

    A step runs in the cheapest bucket that holds it. So the table needs, for each bucket with a causal part,
    one without that is no dearer and holds the decodes that it holds: exactly then every decode-only step has
    a cheapest bucket without a causal part. Buckets that are missing are joined while they stay cheap enough.

    Args:
        cost: by which the table finds buckets.
    """
    held = tuple(buckets)
    missing = sorted(_missing(held, limits, cost), key=lambda each: (each.ceiling, each.shape))
    twins: list[BatchShape] = []
    while missing:
        first, *rest = missing
        twin = first.shape
        for other in rest:
            # The first has the lowest ceiling.
            if cost(twin | other.shape) <= first.ceiling:
                twin |= other.shape
        twins.append(twin)
        missing = [each for each in rest if not twin.holds(each.shape)]
    return tuple(twins)


def _missing(held: tuple[BatchShape, ...], limits: StepLimits, cost: CostFunction) -> Iterator[_Decodes]:
    pure = [(bucket, cost(bucket)) for bucket in held if not bucket.phase.causal]
    phases = [phase for phase in limits.reachable_phases if not phase.causal]
    for bucket in held:
        if not bucket.phase.causal:
            continue
        ceiling = cost(bucket)
        for phase in phases:
            shape = _decodes_in(bucket, phase, limits)
            if shape is not None and not any(
                price <= ceiling and other.holds(shape) for other, price in pure
            ):
                yield _Decodes(shape, ceiling)


def _decodes_in(bucket: BatchShape, phase: Phase, limits: StepLimits) -> BatchShape | None:
    """The join of all reachable steps of a phase that a bucket holds; None where it holds none."""
    if not bucket.phase.holds(phase) or not bucket.num_logits:
        return None
    largest = limits.largest_of(phase)
    num_logits = min(bucket.num_logits, largest.num_logits)
    return BatchShape(
        phase,
        min(bucket.query_len, num_logits * limits.decode_len),
        min(bucket.num_shared_blocks, largest.num_shared_blocks),
        min(bucket.num_unique_blocks, largest.num_unique_blocks),
        num_logits,
    )
