"""Statistics of heads with a KV budget, and of heads whose attention is sparse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bias_builders import Rule, Tile, TopBlocks
from hpu_duo.kv.plan import SparseKind
from kernels_ref import Budget, ChosenBlocks

if TYPE_CHECKING:
    from hpu_duo.engine.step_plan import StepPlan
    from hpu_duo.kv.allocations import KVAllocations
    from hpu_duo.kv.plan import LayerKV, MemoryPlan
    from hpu_duo.kv.store import KVStore
    from kernels_ref import HeadGroup


@dataclass(frozen=True)
class BudgetStats:
    """Statistics of the heads with one kind of budget, over all ranks.

    Attributes:
        policy: name of the policy.
        num_slots: tokens that a head stores of a request.
        chunk: positions between the places at which heads evict tokens of a prompt.
        num_heads: KV heads with the budget, of all layers; replicas on other ranks count too.
        num_evictions: tokens that heads have evicted so far, one for each head.
        bytes_per_request: keys, values, positions and scores of a request.
        held_bytes: of all running requests.
    """

    policy: str
    num_slots: int
    chunk: int
    num_heads: int
    num_evictions: int
    bytes_per_request: int
    held_bytes: int

    @classmethod
    def of(
        cls, num_evicted_tokens: Mapping[int, int], allocations: KVAllocations, memory: MemoryPlan
    ) -> tuple[BudgetStats, ...]:
        """Collect one of each kind.

        Args:
            num_evicted_tokens: tokens that one head has evicted, by its budget.
        """
        groups: dict[Budget, list[tuple[LayerKV, HeadGroup]]] = {}
        for layer, group, kind in budgets_of(memory):
            groups.setdefault(kind, []).append((layer, group))
        return tuple(
            cls._of_kind(
                kind, found, num_evicted_tokens.get(kind.budget, 0), allocations.rows.num_used, memory
            )
            for kind, found in groups.items()
        )

    @classmethod
    def _of_kind(
        cls,
        kind: Budget,
        found: Sequence[tuple[LayerKV, HeadGroup]],
        num_evicted_tokens: int,
        num_rows: int,
        memory: MemoryPlan,
    ) -> BudgetStats:
        row_bytes = sum(
            kind.unit_bytes(
                group.num_heads, memory.token_bytes(layer, group) + kind.state_bytes, memory.block_size
            )
            for layer, group in found
        )
        num_heads = sum(group.num_heads for _, group in found)
        return cls(
            policy=kind.policy.name,
            num_slots=kind.budget,
            chunk=kind.chunk,
            num_heads=num_heads,
            num_evictions=num_evicted_tokens * num_heads,
            bytes_per_request=row_bytes,
            held_bytes=num_rows * row_bytes,
        )


def budgets_of(memory: MemoryPlan) -> Iterator[tuple[LayerKV, HeadGroup, Budget]]:
    """Yield the groups of heads with a budget, of all ranks, with their layer and kind."""
    for layer in memory.layers_of_ranks:
        for group in layer.groups:
            if isinstance(group.kind, Budget):
                yield layer, group, group.kind


def num_evicted_tokens(plan: StepPlan, memory: MemoryPlan) -> Counter[int]:
    """Tokens that each head with a budget evicts in a step, those beyond it, by its budget."""
    return Counter(
        {
            slots: sum(max(0, row.end - slots) - max(0, row.start - slots) for row in plan.rows)
            for slots in memory.budgets
        }
    )


def kept_positions(
    store: KVStore, row: int, num_tokens: int
) -> tuple[tuple[npt.NDArray[np.int32], ...], ...]:
    """Return the positions that each head with a budget stores of a row, ascending, layer by layer.

    Heads are in the order of their group; a layer without a budget has none. Synchronizes with the device.

    Args:
        num_tokens: tokens of the row that are in the cache.
    """
    found = []
    for layer, cache in zip(store.plan.layers, store.layers):
        heads: list[npt.NDArray[np.int32]] = []
        for group, units in zip(layer.groups, cache):
            if isinstance(group.kind, Budget) and units.state is not None:
                lines = units.state.position[row].cpu().numpy().reshape(group.num_heads, -1)
                heads += [np.sort(line[:num_tokens]) for line in lines]
        found.append(tuple(heads))
    return tuple(found)


TILE = 128
"""Queries and keys per side of a counted tile."""


@dataclass(frozen=True)
class TileCounts:
    """Tiles of one head, 128 queries by 128 keys, or block by block for chosen blocks; may be added.

    Attributes:
        num_tiles: tiles in which the rule shows something, or that are chosen.
        num_dense_tiles: tiles of dense attention.
    """

    num_tiles: int = 0
    num_dense_tiles: int = 0

    def plus(self, other: TileCounts) -> TileCounts:
        """Add counts."""
        return TileCounts(self.num_tiles + other.num_tiles, self.num_dense_tiles + other.num_dense_tiles)


@dataclass(frozen=True)
class RuleStats:
    """Statistics of the heads with one rule, or one choice of blocks.

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
    """Add the tiles of a step for each kind. The query of a decode counts as a tile of queries."""
    for kind in memory.sparse_heads:
        for row in plan.rows:
            if isinstance(kind, ChosenBlocks):
                counts = count_chosen(kind.choice, row.start, row.end, memory.block_size)
            else:
                assert kind.rule is not None, "heads without a rule are not sparse"
                counts = count_tiles(kind.rule, row.start, row.end)
            tiles[kind] = tiles.get(kind, TileCounts()).plus(counts)


def count_chosen(choice: TopBlocks, start: int, end: int, block_size: int) -> TileCounts:
    """Count the blocks that tokens ``[start, end)`` of a request attend to, tile by tile, their own included.

    Tokens of a partial tile, as decodes, attend to all blocks.
    """
    numbers = np.arange(start // block_size, -(-end // block_size))
    is_whole = (numbers * block_size >= start) & ((numbers + 1) * block_size <= end)
    dense = numbers + 1
    seen = np.where(is_whole, np.minimum(dense, choice.num_blocks), dense)
    return TileCounts(int(seen.sum()), int(dense.sum()))


def count_tiles(rule: Rule, start: int, end: int) -> TileCounts:
    """Count the tiles in which tokens ``[start, end)`` of a request attend to the tokens before them."""
    first_query = np.arange(start - start % TILE, end, TILE)[:, None]
    first_key = np.arange(0, end, TILE)[None]
    tile = Tile(
        np.maximum(first_query, start),
        np.minimum(first_query + TILE, end) - 1,
        first_key,
        np.minimum(first_key + TILE, end) - 1,
    )
    return TileCounts(int(np.sum(rule.may_see(tile))), int(np.sum(tile.has_past)))
