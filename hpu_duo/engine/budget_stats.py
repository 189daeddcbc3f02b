"""Statistics of heads with a KV budget, and the positions that they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kernels_ref import Budget

if TYPE_CHECKING:
    from hpu_duo.engine.step_plan import StepPlan
    from hpu_duo.kv.leases import KVLeases
    from hpu_duo.kv.plan import LayerKV, MemoryPlan
    from hpu_duo.kv.store import KVStore


@dataclass(frozen=True)
class BudgetStats:
    """A snapshot of the heads that have one kind of budget, those of all ranks together.

    Attributes:
        policy: name of the policy.
        num_slots: tokens that a head keeps of a request.
        chunk: positions between the places at which heads choose what stays of a prompt.
        num_heads: KV heads with the budget, of all layers; a copy on another rank is another one.
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
        cls, num_given_up: Mapping[int, int], leases: KVLeases, memory: MemoryPlan
    ) -> tuple[BudgetStats, ...]:
        """Collect one of each kind.

        Args:
            num_given_up: tokens that one head has evicted, by its budget.
        """
        groups: dict[Budget, list[tuple[LayerKV, int]]] = {}
        for layer, num_heads, kind in budgets_of(memory):
            groups.setdefault(kind, []).append((layer, num_heads))
        return tuple(
            cls._of_kind(kind, found, num_given_up.get(kind.budget, 0), leases.rows.num_used, memory)
            for kind, found in groups.items()
        )

    @classmethod
    def _of_kind(
        cls,
        kind: Budget,
        found: Sequence[tuple[LayerKV, int]],
        num_given_up: int,
        num_rows: int,
        memory: MemoryPlan,
    ) -> BudgetStats:
        row_bytes = sum(
            kind.unit_bytes(
                heads, layer.elements_per_head * memory.dtype_bytes + kind.state_bytes, memory.block_size
            )
            for layer, heads in found
        )
        num_heads = sum(heads for _, heads in found)
        return cls(
            policy=kind.policy.name,
            num_slots=kind.budget,
            chunk=kind.chunk,
            num_heads=num_heads,
            num_evictions=num_given_up * num_heads,
            bytes_per_request=row_bytes,
            held_bytes=num_rows * row_bytes,
        )


def budgets_of(memory: MemoryPlan) -> Iterator[tuple[LayerKV, int, Budget]]:
    """Yield the groups of heads with a budget, of all ranks: their layer, number of heads and kind."""
    for layer in chain(memory.layers, *memory.others):
        for group in layer.groups:
            if isinstance(group.kind, Budget):
                yield layer, group.num_heads, group.kind


def num_given_up(plan: StepPlan, memory: MemoryPlan) -> Counter[int]:
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
    """Return the positions that each head with a budget holds of a row, ascending, layer by layer.

    Heads are in the order of their group; a layer without a budget has none. Waits for the device.

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
