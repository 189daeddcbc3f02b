"""Statistics of heads whose attention is sparse: tiles that a rule leaves to compute, of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bias_builders import Rule, Tile, describe_rule
from kernels_ref import Blocks

if TYPE_CHECKING:
    from hpu_duo.engine.step_plan import StepPlan
    from hpu_duo.kv.plan import MemoryPlan

TILE = 128
"""Queries and keys of a tile that is counted, at multiples of it."""


@dataclass(frozen=True)
class TileCounts:
    """Tiles of one head, 128 queries by 128 keys; they add up.

    Attributes:
        num_tiles: in which the rule may show something.
        num_dense_tiles: that attention without a rule computes.
    """

    num_tiles: int = 0
    num_dense_tiles: int = 0

    def plus(self, other: TileCounts) -> TileCounts:
        """Add counts."""
        return TileCounts(self.num_tiles + other.num_tiles, self.num_dense_tiles + other.num_dense_tiles)


@dataclass(frozen=True)
class RuleStats:
    """A snapshot of the heads that have one rule.

    Attributes:
        rule: as text.
        num_heads: KV heads with the rule, of all layers.
        tiles: of all steps so far, of one of these heads.
    """

    rule: str
    num_heads: int
    tiles: TileCounts

    @classmethod
    def all_of(cls, tiles: Mapping[Rule, TileCounts], memory: MemoryPlan) -> tuple[RuleStats, ...]:
        """Collect those of each rule, in the order of their heads."""
        num_heads: Counter[Rule] = Counter()
        for heads, rule in _rules_of(memory):
            num_heads[rule] += heads
        return tuple(
            cls(describe_rule(rule), heads, tiles.get(rule, TileCounts()))
            for rule, heads in num_heads.items()
        )


def add_tiles(tiles: dict[Rule, TileCounts], plan: StepPlan, memory: MemoryPlan) -> None:
    """Add the tiles of a step for each rule, those of its decodes too, whose query is a tile of queries."""
    if not memory.uses_block_positions:
        return
    for rule in {rule: None for _, rule in _rules_of(memory)}:
        for row in plan.rows:
            counts = count_tiles(rule, row.start, row.end)
            tiles[rule] = tiles.get(rule, TileCounts()).plus(counts)


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


def _rules_of(memory: MemoryPlan) -> Iterator[tuple[int, Rule]]:
    """Yield the number of heads of each group with a rule, and the rule."""
    for layer in memory.layers:
        for group in layer.groups:
            if isinstance(group.kind, Blocks) and group.kind.rule is not None:
                yield group.num_heads, group.kind.rule
