"""Host memory and disk of a simulated server, and the ways to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from graphs import StepLimits
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.kv.allocations import block_moves
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.kv.tiers.disk import DiskTier, Scanned, Written
from hpu_duo.kv.tiers.eviction import ORDERS
from hpu_duo.kv.tiers.host import HostTier, Record
from hpu_duo.kv.tiers.link import SimulatedLink, Timed
from hpu_duo.kv.tiers.policy import LoadPolicy, WritePolicy
from hpu_duo.kv.tiers.prefix_tiers import PrefixTiers, RecordSizes
from hpu_duo.kv.tiers.segments import PAGE, StoredRecord, record_bytes, segment_bytes
from hpu_duo.kv.tiers.stage import Stage
from hpu_duo.kv.tiers.swap import PreemptionMode, SwapSpace
from hpu_duo.kv.tiers.swapping import Swapping
from hpu_duo.planning.simulation import VirtualTime

_LATENCY_S = 20e-6
_SHARE = 4


class SimulatedDisk:
    """Segments of records without bytes, on a virtual clock; reads and writes wait for each other.

    See ``hpu_duo.kv.tiers.disk.DiskAccess``.

    Args:
        limit: bytes of all segments.
        slot_bytes: of a slot of a record.
        largest: bytes of the largest record.
        rate: bytes a second.
        time: the clock.

    Raises:
        ValueError: not even one record fits.
    """

    path, is_writer, has_orders = Path("simulated"), True, False

    def __init__(self, limit: int, slot_bytes: int, largest: int, rate: float, time: VirtualTime) -> None:
        self._limit, self._slot_bytes, self._rate, self._time = limit, slot_bytes, rate, time
        self._segment_bytes = self._end = segment_bytes(limit, largest)
        self._segments: deque[str] = deque()
        self._num_begun, self._free_at = 0, 0.0

    def _moved(self, num_bytes: int) -> tuple[float, float]:
        """Seconds of a read or write that begins behind earlier ones, and its end."""
        seconds = num_bytes / self._rate
        self._free_at = max(self._time.now, self._free_at) + seconds
        return seconds, self._free_at

    def scan(self) -> Timed[Scanned]:
        """Return nothing: the folder is empty."""
        return Timed(Scanned(), self._time.now, lambda: self._time.now)

    def write(self, batch: Sequence[Record]) -> Timed[Written]:
        """Append records; the oldest segment is dropped for a new one."""
        stored, dropped, num_bytes = list[StoredRecord](), list[str](), 0
        for each in batch:
            payload = len(each.slots) * self._slot_bytes
            size = record_bytes(payload)
            if self._end + size > self._segment_bytes:
                if (len(self._segments) + 1) * self._segment_bytes > self._limit:
                    dropped.append(self._segments.popleft())
                self._num_begun += 1
                self._segments.append(str(self._num_begun))
                self._end = PAGE
            segment = self._segments[-1]
            own = each.num_own_tokens
            stored.append(StoredRecord(each.key, each.parent, own, payload, 0, segment, self._end))
            self._end += size
            num_bytes += size
        seconds, end = self._moved(num_bytes)
        return Timed(Written(stored, dropped, seconds), end, lambda: self._time.now)

    def read(self, stored: StoredRecord, record: Record) -> Timed[float]:
        """Read a record; returns seconds."""
        seconds, end = self._moved(record_bytes(stored.num_bytes))
        return Timed(seconds, end, lambda: self._time.now)

    def take_orders(self) -> None:
        """Return None: there is one rank."""

    def forget(self) -> None:
        """Do nothing: work has begun."""


@dataclass(frozen=True)
class SimulatedHost:
    """Host memory for what the prefix cache evicts, and what lies behind it.

    Attributes:
        num_slots: slots of a block each.
        block_bytes, row_bytes: of a block and of a row, all devices together; 0 where there are none.
        link: bytes a second of all devices together, each way.
        eviction: name of the order in which records are evicted.
        write: the moment at which records are stored.
        min_tokens: of texts that are stored by ``WRITE_THROUGH_COST``.
        disk_bytes, disk_rate: of a disk behind it, and bytes a second; 0 bytes = there is none.
        num_swap_slots: further slots, for preempted requests.
        preemption: the way in which these come back.
    """

    num_slots: int
    block_bytes: int
    row_bytes: int
    link: float
    eviction: str = "lru"
    write: WritePolicy = WritePolicy.WRITE_BACK
    min_tokens: int = 1
    disk_bytes: int = 0
    disk_rate: float = 3e9
    num_swap_slots: int = 0
    preemption: PreemptionMode = PreemptionMode.RECOMPUTE

    def __post_init__(self) -> None:
        if self.disk_bytes:
            segment_bytes(self.disk_bytes, self._slot_bytes * self._slots_per_row)

    @property
    def _slot_bytes(self) -> int:
        return self.block_bytes or self.row_bytes

    @property
    def _slots_per_row(self) -> int:
        """Slots of a row, 1 where there are none."""
        return max(1, -(-self.row_bytes // self._slot_bytes))

    @classmethod
    def of(
        cls, num_bytes: int, memory: MemoryPlan, link: float, limits: StepLimits, swap_bytes: int = 0
    ) -> SimulatedHost:
        """Return the slots that fit in host memory.

        Args:
            swap_bytes: of host memory for preempted requests.
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
        found = cls(num_bytes // slot, block, row, link, num_swap_slots=swap_bytes // slot)
        needed = slot * (bool(block) + bool(row) * found._slots_per_row)
        if swap_bytes and found.num_swap_slots * slot < needed:
            raise ValueError(
                f"expected --swap-space of one block or more, {needed:,} bytes, got {swap_bytes:,} bytes"
            )
        return found

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
        allocations, slot, per_row = scheduler.allocations, self._slot_bytes, self._slots_per_row
        size = scheduler.limits.block_size
        host = HostTier(self.num_slots, size, ORDERS[self.eviction](self.num_slots))
        policy = LoadPolicy(byte_s=1.0 / self.link)
        stage = Stage(link, allocations.staged_units, allocations.add_copy)
        tiers = PrefixTiers(
            *(host, stage, RecordSizes(*sizes, slot, per_row), self.write),
            load_policy=policy,
            min_tokens=self.min_tokens,
        )
        if self.disk_bytes:
            disk = SimulatedDisk(self.disk_bytes, slot, slot * per_row, self.disk_rate, time)
            tiers.disk, policy.disk_byte_s = DiskTier(disk, host, slot, size), 1.0 / self.disk_rate
        allocations.attach(tiers)
        if self.num_swap_slots:
            room = range(self.num_slots, self.num_slots + self.num_swap_slots)
            tiers.swap = SwapSpace(stage, room, per_row if self.row_bytes else 0, slot)
            scheduler.swapping = Swapping(allocations, tiers.swap, self.preemption, policy)
        return link
