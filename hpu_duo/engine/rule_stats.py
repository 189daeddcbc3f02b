"""Statistics of heads whose attention is sparse: tiles that a rule or a choice leaves to compute, of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bias_builders import Rule, Tile, TopBlocks
from hpu_duo.kv.plan import SparseKind
from kernels_ref import ChosenBlocks

if TYPE_CHECKING:
    from hpu_duo.engine.step_plan import StepPlan
    from hpu_duo.kv.plan import MemoryPlan

TILE = 128
"""Queries and keys of a tile that is counted, at multiples of it."""


@dataclass(frozen=True)
class TileCounts:
    """Tiles of one head, 128 queries by 128 keys, or a block by a block under a choice; they add up.

    Attributes:
        num_tiles: in which the rule may show something, or that are chosen.
        num_dense_tiles: that attention without a rule computes.
    """

    num_tiles: int = 0
    num_dense_tiles: int = 0

    def plus(self, other: TileCounts) -> TileCounts:
        """Add counts."""
        return TileCounts(self.num_tiles + other.num_tiles, self.num_dense_tiles + other.num_dense_tiles)


@dataclass(frozen=True)
class RuleStats:
    """A snapshot of the heads that have one rule, or one choice of blocks.

    Attributes:
        rule: as text.
        num_heads: KV heads with the rule, of all layers.
        tiles: of all steps so far, of one of these heads.
    """

    rule: str
    num_heads: int
    tiles: TileCounts

    @classmethod
    def all_of(cls, tiles: Mapping[SparseKind, TileCounts], memory: MemoryPlan) -> tuple[RuleStats, ...]:
        """Collect those of each kind of heads, in the order of the heads."""
        return tuple(
            cls(kind.describe(), num_heads, tiles.get(kind, TileCounts()))
            for kind, num_heads in memory.sparse_heads.items()
        )


def add_tiles(tiles: dict[SparseKind, TileCounts], plan: StepPlan, memory: MemoryPlan) -> None:
    """Add the tiles of a step for each kind, those of its decodes too, whose query is a tile of queries."""
    for kind in memory.sparse_heads:
        for row in plan.rows:
            if isinstance(kind, ChosenBlocks):
                counts = count_chosen(kind.choice, row.start, row.end, memory.block_size)
            else:
                assert kind.rule is not None, "heads without a rule are not sparse"
                counts = count_tiles(kind.rule, row.start, row.end)
            tiles[kind] = tiles.get(kind, TileCounts()).plus(counts)


def count_chosen(choice: TopBlocks, start: int, end: int, block_size: int) -> TileCounts:
    """Count the blocks that the tiles of tokens ``[start, end)`` of a request meet, their own included.

    Those of a tile that is not whole, which are decodes too, see all blocks.
    """
    numbers = np.arange(start // block_size, -(-end // block_size))
    is_whole = (numbers * block_size >= start) & ((numbers + 1) * block_size <= end)
    dense = numbers + 1
    seen = np.where(is_whole, np.minimum(dense, choice.num_blocks), dense)
    return TileCounts(int(seen.sum()), int(dense.sum()))


def count_tiles(rule: Rule, start: int, end: int) -> TileCounts:
    """Count the tiles in which tokens ``[start, end)`` of a request meet the tokens before them."""
    first_query = np.arange(start - start % TILE, end, TILE)[:, None]
    first_key = np.arange(0, end, TILE)[None]
    tile = Tile(
        np.maximum(first_query, start),
        np.minimum(first_query + TILE, end) - 1,
        first_key,
        np.minimum(first_key + TILE, end) - 1,
    )
    return TileCounts(int(np.sum(rule.may_see(tile))), int(np.sum(tile.has_past)))
