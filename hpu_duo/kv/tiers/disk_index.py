"""The index of records on disk, in memory."""

from __future__ import annotations

from collections.abc import Iterable

from hpu_duo.kv.tiers.host import PartialRecords, RecordKey
from hpu_duo.kv.tiers.segments import StoredRecord, record_bytes


class DiskIndex:
    """Records of a folder by key.

    Args:
        block_size: tokens of a full block.

    Attributes:
        num_bytes: of the records.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.clear()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: RecordKey) -> StoredRecord | None:
        """Return a record."""
        return self._records.get(key)

    def partial_blocks(self, digest: bytes) -> Iterable[StoredRecord]:
        """Return the records of partial blocks, or of their snapshots, behind a prefix of full blocks."""
        return self._partial.behind(digest)

    def add(self, found: Iterable[StoredRecord]) -> None:
        """Add records, in place of earlier ones with their keys."""
        for stored in found:
            if (older := self._records.get(stored.key)) is not None:
                self.drop(older)
            self._records[stored.key] = stored
            self._by_segment.setdefault(stored.segment, {})[stored.key] = stored
            self.num_bytes += record_bytes(stored.num_bytes)
            if stored.num_own_tokens < self._block_size:
                self._partial.add(stored)

    def drop(self, stored: StoredRecord) -> None:
        """Remove a record, if it is there."""
        if self._records.get(stored.key) == stored:
            del self._records[stored.key], self._by_segment[stored.segment][stored.key]
            self.num_bytes -= record_bytes(stored.num_bytes)
            if stored.num_own_tokens < self._block_size:
                self._partial.remove(stored)

    def drop_segments(self, names: Iterable[str]) -> int:
        """Remove the records of segments; returns their number."""
        number = 0
        for name in names:
            for stored in tuple(self._by_segment.get(name, {}).values()):
                number += 1
                self.drop(stored)
            self._by_segment.pop(name, None)
        return number

    def keep_segments(self, names: frozenset[str]) -> int:
        """Remove the records of all other segments; returns their number."""
        return self.drop_segments(self._by_segment.keys() - names)

    def clear(self) -> None:
        """Remove all records."""
        self._records: dict[RecordKey, StoredRecord] = {}
        self._by_segment: dict[str, dict[RecordKey, StoredRecord]] = {}
        self._partial: PartialRecords[StoredRecord] = PartialRecords()
        self.num_bytes = 0
