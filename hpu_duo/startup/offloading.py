"""Sizes of the tier in host memory, and the parts of an engine that serve it."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import NamedTuple

from graphs import StepLimits
from hpu_duo.config.limits import CacheConfig
from hpu_duo.device.runtime import host_memory
from hpu_duo.kv.allocations import KVAllocations
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.kv.store import KVStore, block_units, row_units
from hpu_duo.kv.tiers.host import HostTier
from hpu_duo.kv.tiers.host_link import HostLink
from hpu_duo.kv.tiers.link import Link
from hpu_duo.kv.tiers.policy import WritePolicy
from hpu_duo.kv.tiers.prefix_tiers import PrefixTiers, RecordSizes

_GIB = 1 << 30
_SHARE = 4
"""At most one of so many blocks, and of so many snapshots, is reserved for transfers."""


class Staged(NamedTuple):
    """Numbers of blocks and of snapshot rows that are reserved for transfers, half for each direction."""

    num_blocks: int
    num_rows: int


def staged_units(cache: CacheConfig | None, memory: MemoryPlan, num_filled: int) -> Staged:
    """Return what is reserved for transfers; nothing without a tier.

    Args:
        num_filled: blocks that a step fills, hence the most that it evicts.

    Raises:
        ValueError: the cache is too small.
    """
    if cache is None or cache.kv_offloading_size is None:
        return Staged(0, 0)
    per_step = cache.kv_offloading_blocks_per_step or num_filled
    num_blocks = num_rows = 0
    if memory.uses_blocks:
        num_blocks = 2 * min(per_step, memory.num_blocks // (2 * _SHARE))
        if not num_blocks:
            raise ValueError(
                f"expected {2 * _SHARE} blocks or more with kv_offloading_size, of which some are reserved "
                f"for transfers, got num_blocks={memory.num_blocks}"
            )
    if memory.uses_rows:
        num_rows = 2 * max(1, memory.num_snapshots // (2 * _SHARE))
        if memory.num_snapshots <= num_rows:
            raise ValueError(
                f"expected num_prefix_snapshots of {num_rows + 1} or more with kv_offloading_size, of which "
                f"{num_rows} are reserved for transfers, got {memory.num_snapshots}"
            )
    return Staged(num_blocks, num_rows)


class HostSlots(NamedTuple):
    """Slots of the records of one rank.

    Attributes:
        number: of slots.
        num_bytes: of one, on this rank.
        per_row: that a snapshot fills, the same on all ranks.
    """

    number: int
    num_bytes: int
    per_row: int

    @classmethod
    def of(cls, size_gib: float, memory: MemoryPlan) -> HostSlots:
        """Return the slots of a tier: a block fills one, a snapshot as many as it needs.

        Args:
            size_gib: GiB of all ranks together.

        Raises:
            ValueError: the size is below one record, or above the free memory of the host.
        """
        plans = [replace(memory, layers=layers, others=()) for layers in (memory.layers, *memory.others)]
        sizes = [plan.block_bytes if memory.uses_blocks else plan.row_bytes for plan in plans]
        per_row = max(-(-plan.row_bytes // size) if size else 1 for plan, size in zip(plans, sizes))
        # A rank without blocks only has the slots of snapshots.
        sizes = [size or max(1, -(-plan.row_bytes // per_row)) for plan, size in zip(plans, sizes)]
        total, free = int(size_gib * _GIB), host_memory().free
        if total < sum(sizes):
            raise ValueError(
                f"expected kv_offloading_size of one block or more, {sum(sizes):,} bytes, got {total:,} bytes"
            )
        if total > free:
            raise ValueError(
                f"expected kv_offloading_size within the free memory of the host, {free:,} bytes, got "
                f"{total:,} bytes"
            )
        return cls(total // sum(sizes), sizes[0], per_row)


def host_link(cache: CacheConfig, store: KVStore, limits: StepLimits, *, is_padded: bool) -> HostLink | None:
    """Allocate the records of this rank; None without a tier.

    Args:
        is_padded: whether the device compiles operators by their shapes.
    """
    if cache.kv_offloading_size is None:
        return None
    slots = HostSlots.of(cache.kv_offloading_size, store.plan)
    padded = (limits.num_staged_blocks // 2, limits.num_staged_rows // 2) if is_padded else None
    return HostLink(block_units(store), row_units(store), slots.number, slots.num_bytes, padded)


def attach_tiers(
    cache: CacheConfig, memory: MemoryPlan, limits: StepLimits, allocations: KVAllocations, link: Link | None
) -> None:
    """Connect the prefix cache of an engine to its records on the host, if it has any."""
    if cache.kv_offloading_size is None or link is None:
        return
    slots = HostSlots.of(cache.kv_offloading_size, memory)
    allocations.attach(
        PrefixTiers(
            HostTier(slots.number, limits.block_size),
            weakref.proxy(link),  # the executor's: allocations and their parts refer to each other
            allocations.staged_units,
            RecordSizes(
                max(1, memory.block_bytes) if memory.uses_blocks else 0,
                max(1, memory.row_bytes) if memory.uses_rows else 0,
                slots.num_bytes,
                slots.per_row,
            ),
            allocations.add_copy,
            WritePolicy(cache.kv_offloading_write_policy),
        )
    )
