"""A process that runs the tier on disk alone, until it is killed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hpu_duo.kv.tiers.disk import DiskThreads, DiskTier, SegmentFolder
from hpu_duo.kv.tiers.eviction import LeastRecentlyUsed
from hpu_duo.kv.tiers.host import HostTier, Record, RecordKey
from hpu_duo.kv.tiers.records import RecordMemory

SLOT_BYTES = 5000


def payload(number: int) -> npt.NDArray[np.uint8]:
    """Bytes of a record."""
    return np.random.default_rng(number).integers(0, 256, SLOT_BYTES, np.uint8)


def tier(folder: Path, limit: int, model: int = 0) -> tuple[DiskTier, HostTier, RecordMemory]:
    """A tier with eight slots on the host."""
    host = HostTier(8, 4, LeastRecentlyUsed())
    memory = RecordMemory(np.zeros((8, SLOT_BYTES), np.uint8), (SLOT_BYTES, 0))
    segments = SegmentFolder(folder, model.to_bytes(32, "little"), limit, SLOT_BYTES)
    return DiskTier(DiskThreads(segments, memory), host, SLOT_BYTES, 4), host, memory


def fill(memory: RecordMemory, record: Record, number: int) -> None:
    """Let the bytes of a record land on the host."""
    memory.slots[list(record.slots)] = payload(number)
    memory.seal(record.slots, is_row=False)
    record.is_present = True


if __name__ == "__main__":
    disk, host, memory = tier(Path(sys.argv[1]), int(sys.argv[2]))
    number = 0
    while True:
        record = host.reserve(RecordKey(number.to_bytes(32, "big"), is_row=False), bytes(32), 4, 4, 1)
        if record is not None:
            fill(memory, record, number)
            disk.offer(record)
            number = (number + 1) % 4000
            if number == 10:
                print("begun", flush=True)
        disk.poll()
