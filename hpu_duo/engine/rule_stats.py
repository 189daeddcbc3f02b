"""Statistics of heads whose attention is sparse: tiles that a rule leaves to compute, of all."""

from __future__ import annotations

from collections.abc import Iterator
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
    """A snapshot of the heads that have a rule.

    Attributes:
        rule: as text.
        num_heads: KV heads with the rule, of all layers.
        tiles: of all steps so far, of one of these heads.
    """

    rule: str
    num_heads: int
    tiles: TileCounts

    @classmethod
    def of(cls, tiles: TileCounts, memory: MemoryPlan) -> RuleStats | None:
        """Collect it; None where no head has a rule."""
        found = list(_rules_of(memory))
        if not found:
            return None
        return cls(describe_rule(found[0][1]), sum(num_heads for num_heads, _ in found), tiles)


def tiles_of(plan: StepPlan, memory: MemoryPlan) -> TileCounts:
    """Count the tiles of a step, those of its decodes too: a decode's query is a tile of queries."""
    total = TileCounts()
    if memory.uses_block_positions:
        rule = next(rule for _, rule in _rules_of(memory))
        for row in plan.rows:
            total = total.plus(count_tiles(rule, row.start, row.end))
    return total


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
