"""Uses of a table on recorded steps, and the mixed buckets that tables of prompts and decodes lack."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from graphs.shape import BatchShape, Phase
from graphs.table import BucketTable, Miss


@dataclass(frozen=True)
class TableUse:
    """Steps of a recording in the buckets of a table.

    Attributes:
        counts: steps of each bucket that has any.
        num_missed: steps that no bucket holds.
        mean, worst: padding of the others, as a share of the cost of the exact shape; 0 without any.
    """

    counts: Mapping[BatchShape, int]
    num_missed: int
    mean: float
    worst: float

    @classmethod
    def of(cls, table: BucketTable, traffic: Mapping[BatchShape, int]) -> TableUse:
        """Assign each step to its bucket; costs are those of the table."""
        counts: dict[BatchShape, int] = {}
        num_missed, exact, padded, worst = 0, 0.0, 0.0, 0.0
        for shape, count in traffic.items():
            bucket = table.fit(shape)
            if isinstance(bucket, Miss):
                num_missed += count
                continue
            counts[bucket] = counts.get(bucket, 0) + count
            least, most = table.cost(shape), table.cost(bucket)
            exact, padded, worst = exact + count * least, padded + count * most, max(worst, most / least - 1)
        return cls(counts, num_missed, padded / exact - 1 if exact else 0.0, worst)

    @property
    def num_steps(self) -> int:
        """All steps of the recording."""
        return sum(self.counts.values()) + self.num_missed


def mixed_buckets(shapes: Collection[BatchShape], most_tokens: int | None = None) -> tuple[BatchShape, ...]:
    """Return buckets of the phases ``c-u``, ``csu`` and ``-su`` for a table of ``c--``, ``cs-`` and ``--u``.

    Each prompt bucket gets one beside the decodes of the largest sizes, and each decode bucket one whose
    context may be shared as a whole. Buckets that are in the table already are left out.

    Args:
        shapes: buckets of the table.
        most_tokens: query tokens of a step; None is as many as the largest bucket has.
    """
    prompts = [shape for shape in shapes if shape.phase.causal and not shape.phase.unique]
    decodes = [shape for shape in shapes if shape.phase == Phase(unique=True)]
    if not decodes:
        return ()
    largest = max(shape.query_len for shape in shapes) if most_tokens is None else most_tokens
    found = [*_beside_decodes(prompts, decodes, largest, max(shape.num_logits for shape in shapes))]
    for shape in decodes:
        phase = Phase(shared=True, unique=True)
        found.append(replace(shape, phase=phase, num_shared_blocks=shape.num_unique_blocks))
    return tuple(sorted(set(found) - set(shapes)))


def _beside_decodes(
    prompts: Collection[BatchShape], decodes: Collection[BatchShape], most_tokens: int, most_logits: int
) -> Iterator[BatchShape]:
    """Each prompt bucket with as many decode rows and blocks as any decode bucket has, within the limits."""
    num_rows = max(shape.query_len for shape in decodes)
    num_blocks = max(shape.num_unique_blocks for shape in decodes)
    for shape in prompts:
        yield BatchShape(
            shape.phase | Phase(unique=True),
            max(shape.query_len, min(shape.query_len + num_rows, most_tokens)),
            shape.num_shared_blocks,
            num_blocks,
            min(shape.num_logits + num_rows, most_logits),
        )
