"""Host memory of a simulated server, and the link to it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphs import StepLimits
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.kv.allocations import block_moves
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.kv.tiers.eviction import ORDERS
from hpu_duo.kv.tiers.host import HostTier
from hpu_duo.kv.tiers.link import SimulatedLink
from hpu_duo.kv.tiers.policy import LoadPolicy, WritePolicy
from hpu_duo.kv.tiers.prefix_tiers import PrefixTiers, RecordSizes
from hpu_duo.kv.tiers.stage import Stage
from hpu_duo.planning.simulation import VirtualTime

_LATENCY_S = 20e-6
_SHARE = 4


@dataclass(frozen=True)
class SimulatedHost:
    """Host memory for what the prefix cache evicts.

    Attributes:
        num_slots: slots of a block each.
        block_bytes, row_bytes: of a block and of a row, all devices together; 0 where there are none.
        link: bytes a second of all devices together, each way.
        eviction: name of the order in which records are evicted.
        write: the moment at which records are stored.
        min_tokens: of texts that are stored by ``WRITE_THROUGH_COST``.
    """

    num_slots: int
    block_bytes: int
    row_bytes: int
    link: float
    eviction: str = "lru"
    write: WritePolicy = WritePolicy.WRITE_BACK
    min_tokens: int = 1

    @classmethod
    def of(cls, num_bytes: int, memory: MemoryPlan, link: float, limits: StepLimits) -> SimulatedHost:
        """Return the slots that fit in host memory.

        Args:
            memory: of all devices together.
            link: bytes a second of all devices together, each way.

        Raises:
            ValueError: not even one fits, or nothing is cached.
        """
        if not limits.caches_prefixes:
            raise ValueError("expected --kv-offloading-size with --enable-prefix-caching")
        block = memory.block_bytes if limits.uses_blocks else 0
        row = memory.row_bytes if limits.uses_rows else 0
        slot = block or row
        if num_bytes < slot:
            raise ValueError(
                f"expected --kv-offloading-size of one block or more, {slot:,} bytes, got {num_bytes:,} bytes"
            )
        return cls(num_bytes // slot, block, row, link)

    def staged(self, limits: StepLimits) -> StepLimits:
        """Return the limits with the units that are reserved for transfers, as an engine has them."""
        filled = block_moves(limits.max_num_batched_tokens, limits.block_size)
        blocks = 2 * min(filled, limits.num_blocks // (2 * _SHARE)) if limits.uses_blocks else 0
        rows = 2 * max(1, limits.num_snapshots // (2 * _SHARE)) if limits.uses_rows else 0
        if (limits.uses_blocks and not blocks) or (rows and limits.num_snapshots <= rows):
            raise ValueError(
                f"expected 8 blocks and {rows + 1} snapshots or more with --kv-offloading-size, of which "
                f"some are reserved for transfers, got {limits.num_blocks} and {limits.num_snapshots}"
            )
        return replace(limits, num_staged_blocks=blocks, num_staged_rows=rows)

    def attach(self, scheduler: Scheduler, time: VirtualTime) -> SimulatedLink:
        """Connect the prefix cache of a scheduler to it; returns its link."""
        sizes = (self.block_bytes, self.row_bytes)
        link = SimulatedLink(sizes, _LATENCY_S, self.link, self.link, lambda: time.now, time.move)
        allocations, slot = scheduler.allocations, self.block_bytes or self.row_bytes
        per_row = -(-self.row_bytes // slot) if self.row_bytes else 1
        allocations.attach(
            PrefixTiers(
                HostTier(self.num_slots, scheduler.limits.block_size, ORDERS[self.eviction](self.num_slots)),
                Stage(link, allocations.staged_units, allocations.add_copy),
                RecordSizes(*sizes, slot, per_row),
                self.write,
                load_policy=LoadPolicy(byte_s=1.0 / self.link),
                min_tokens=self.min_tokens,
            )
        )
        return link
