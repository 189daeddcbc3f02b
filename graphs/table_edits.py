"""Uses of a table on recorded steps, and the mixed buckets that tables of prompts and decodes lack."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

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


def mixed_buckets(
    shapes: Collection[BatchShape], most_tokens: int | None = None, num_decode_sizes: int = 3
) -> tuple[BatchShape, ...]:
    """Return buckets of the phases ``c-u``, ``csu`` and ``-su`` for a table of ``c--``, ``cs-`` and ``--u``.

    Each prompt bucket gets one beside the decodes of the largest sizes, one beside decodes with a quarter of
    these blocks, one with a sixteenth, and so on. Each decode bucket of several rows gets two with a shared
    part, of half as many blocks because two rows or more read each: one beside all of its blocks, one beside
    a quarter of them. One of the largest sizes covers all other decodes with a shared part. Buckets that are
    in the table already are left out, and no size exceeds the largest of the table.

    Args:
        shapes: buckets of the table.
        most_tokens: query tokens of a step; None is as many as the largest bucket has.
        num_decode_sizes: most buckets for each prompt bucket; 1 covers all mixed steps, coarsely.
    """
    prompts = [shape for shape in shapes if shape.phase.causal and not shape.phase.unique]
    decodes = [shape for shape in shapes if shape.phase == Phase(unique=True)]
    if not decodes:
        return ()
    largest = max(shape.query_len for shape in shapes) if most_tokens is None else most_tokens
    most_logits = max(shape.num_logits for shape in shapes)
    found = [
        BatchShape(
            shape.phase | Phase(unique=True),
            max(shape.query_len, min(shape.query_len + num_rows, largest)),
            shape.num_shared_blocks,
            num_blocks,
            min(shape.num_logits + num_rows, most_logits),
        )
        for shape, (num_rows, num_blocks) in product(prompts, _decode_sizes(decodes, num_decode_sizes))
    ]
    return tuple(sorted({*found, *_sharing(decodes)} - set(shapes)))


def _decode_sizes(decodes: Collection[BatchShape], number: int) -> dict[tuple[int, int], None]:
    """Rows and blocks: the most of all decodes, of those with a quarter of the blocks, and so on."""
    most = max(shape.num_unique_blocks for shape in decodes)
    sizes: dict[tuple[int, int], None] = {}
    for step in range(number):
        within = [shape for shape in decodes if shape.num_unique_blocks <= most >> 2 * step]
        if within:
            num_blocks = max(shape.num_unique_blocks for shape in within)
            sizes[max(shape.query_len for shape in within), num_blocks] = None
    return sizes


def _sharing(decodes: Collection[BatchShape]) -> Iterator[BatchShape]:
    """Decode buckets with a shared part, whose blocks two rows or more read."""
    phase = Phase(shared=True, unique=True)
    decodes = [shape for shape in decodes if shape.query_len > 1]
    if not decodes:
        return
    for shape in decodes:
        blocks = shape.num_unique_blocks
        for unique in (blocks, -(-blocks // 4)):
            yield replace(shape, phase=phase, num_shared_blocks=-(-blocks // 2), num_unique_blocks=unique)
    num_rows, blocks = next(iter(_decode_sizes(decodes, 1)))
    yield BatchShape(phase, num_rows, blocks, blocks, max(shape.num_logits for shape in decodes))
