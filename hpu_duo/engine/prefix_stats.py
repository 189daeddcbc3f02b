"""Counts and bytes of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpu_duo.kv.leases import KVLeases
    from hpu_duo.kv.plan import MemoryPlan


@dataclass(frozen=True)
class PrefixStats:
    """A snapshot of the prefix cache.

    Attributes:
        num_queried_tokens: known tokens of requests when they got a row, again after a preemption.
        num_hit_tokens: those of them that were taken up from the cache.
        num_lost_to_snapshots: those that lay in cached blocks, but behind the last snapshot of rings.
        num_lost_to_blocks: those that had been in cached blocks, which were evicted, as far as is remembered.
        num_evicted_blocks, num_evicted_snapshots: evicted to make room.
        num_idle_blocks: blocks that are kept and held by nobody.
        num_held_blocks: blocks that contexts hold.
        num_snapshots: snapshots of rings.
        idle_bytes, context_bytes, snapshot_bytes: what they take.
    """

    num_queried_tokens: int
    num_hit_tokens: int
    num_lost_to_snapshots: int
    num_lost_to_blocks: int
    num_evicted_blocks: int
    num_evicted_snapshots: int
    num_idle_blocks: int
    num_held_blocks: int
    num_snapshots: int
    idle_bytes: int
    context_bytes: int
    snapshot_bytes: int

    @classmethod
    def of(cls, leases: KVLeases, memory: MemoryPlan) -> PrefixStats | None:
        """Collect the counters; None where prefixes are not cached."""
        cache = leases.prefixes
        if cache is None:
            return None
        return cls(
            **vars(cache.counters),
            num_idle_blocks=leases.blocks.num_idle,
            num_held_blocks=leases.num_held_blocks,
            num_snapshots=cache.num_snapshots,
            idle_bytes=leases.blocks.num_idle * memory.block_bytes,
            context_bytes=leases.num_held_blocks * memory.block_bytes,
            snapshot_bytes=cache.num_snapshots * memory.row_bytes,
        )

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that were taken up."""
        return self.num_hit_tokens / max(1, self.num_queried_tokens)
