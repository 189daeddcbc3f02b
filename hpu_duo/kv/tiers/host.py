"""The index of records in host memory, and their slots; no bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar


class RecordKey(NamedTuple):
    """Identity of a record.

    Attributes:
        digest: of the prefix that it ends, ``PrefixNode.digest``.
        is_row: whether it is the snapshot of a row at that end; otherwise the last block.
    """

    digest: bytes
    is_row: bool


class HasKey(Protocol):
    """A record of any tier; see ``Record``."""

    @property
    def key(self) -> RecordKey:
        """Identity of the record."""
        ...

    @property
    def parent(self) -> bytes:
        """Digest of the prefix that is one block shorter."""
        ...


R = TypeVar("R", bound=HasKey)


class PartialRecords(Generic[R]):
    """Records of partial blocks, or of their snapshots, by the prefix of whole blocks before them."""

    def __init__(self) -> None:
        self._records: dict[bytes, dict[bytes, R]] = {}

    def behind(self, digest: bytes) -> Iterable[R]:
        """Return those behind a prefix of full blocks, one of a block and its snapshot."""
        return self._records.get(digest, {}).values()

    def add(self, record: R) -> None:
        """Add a record."""
        self._records.setdefault(record.parent, {})[record.key.digest] = record

    def remove(self, record: R) -> None:
        """Remove a record."""
        others = self._records.get(record.parent, {})
        if others.get(record.key.digest) is record:
            del others[record.key.digest]
        if not others:
            self._records.pop(record.parent, None)


@dataclass(eq=False, slots=True)
class Record:
    """A block, or a snapshot of a row, in host memory.

    Attributes:
        key: of the record.
        parent: digest of the prefix that is one block shorter.
        num_own_tokens: tokens of the last block.
        num_tokens: of the prefix.
        slots: ids of its slots.
        is_present: whether its bytes have arrived.
        num_readers: loads that need it; it is not evicted meanwhile.
    """

    key: RecordKey
    parent: bytes
    num_own_tokens: int
    num_tokens: int
    slots: tuple[int, ...]
    is_present: bool = False
    num_readers: int = 0


class EvictionOrder(Protocol):
    """Order of the records of a tier; a record is added, may be used, and is removed once."""

    def add(self, record: Record) -> None:
        """Add a record that is used now."""
        ...

    def use(self, record: Record) -> None:
        """Note a use of a record."""
        ...

    def remove(self, record: Record, *, is_evicted: bool) -> None:
        """Remove a record.

        Args:
            is_evicted: for room; otherwise its bytes were lost.
        """
        ...

    def __iter__(self) -> Iterator[Record]:
        """Yield the records, the first to be evicted first; the order changes by the other methods only."""
        ...


class HostTier:
    """Records by key; all slots have the same size.

    Args:
        num_slots: number of slots.
        block_size: tokens of a full block.
        order: in which records are evicted.
    """

    def __init__(self, num_slots: int, block_size: int, order: EvictionOrder) -> None:
        self.num_slots, self._block_size, self._order = num_slots, block_size, order
        self._free = list(reversed(range(num_slots)))
        self._records: dict[RecordKey, Record] = {}
        self._partial: PartialRecords[Record] = PartialRecords()
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    @property
    def num_used_slots(self) -> int:
        """Number of slots with a record."""
        return self.num_slots - len(self._free)

    def get(self, key: RecordKey) -> Record | None:
        """Return a record whose bytes are here."""
        record = self._records.get(key)
        return record if record is not None and record.is_present else None

    def knows(self, key: RecordKey) -> bool:
        """Whether there is a record, or one is on its way."""
        return key in self._records

    def partial_blocks(self, digest: bytes) -> Iterable[Record]:
        """Return the records of partial blocks, or of their snapshots, behind a prefix of full blocks."""
        return self._partial.behind(digest)

    def has(self, record: Record) -> bool:
        """Whether a record has not been dropped."""
        return self._records.get(record.key) is record

    def use(self, keys: Iterable[RecordKey]) -> None:
        """Mark records as used now, the last one as the most recent."""
        for key in keys:
            if (record := self._records.get(key)) is not None:
                self._order.use(record)

    def reserve(
        self, key: RecordKey, parent: bytes, num_own_tokens: int, num_tokens: int, num_slots: int
    ) -> Record | None:
        """Allocate slots to a new record; others are evicted for it. See ``Record`` for the arguments.

        Returns:
            None, and nothing has changed, if records on their way, or that loads need, have the slots.
        """
        assert key not in self._records, "expected a new record"
        if not self._make_room(num_slots):
            return None
        slots = tuple(self._free.pop() for _ in range(num_slots))
        record = self._records[key] = Record(key, parent, num_own_tokens, num_tokens, slots)
        self._order.add(record)
        if num_own_tokens < self._block_size:
            self._partial.add(record)
        return record

    def _make_room(self, num_slots: int) -> bool:
        missing, going = num_slots - len(self._free), list[Record]()
        for record in self._order if missing > 0 else ():
            if missing <= 0:
                break
            if record.is_present and not record.num_readers:
                going.append(record)
                missing -= len(record.slots)
        if missing > 0:
            return False
        for record in going:
            self.num_evicted += 1
            self.drop(record, is_evicted=True)
        return True

    def drop(self, record: Record, *, is_evicted: bool = False, frees: bool = True) -> None:
        """Remove a record.

        Args:
            frees: whether its slots are free; otherwise nothing uses them again.
        """
        self._order.remove(record, is_evicted=is_evicted)
        del self._records[record.key]
        if frees:
            self._free += record.slots
        if record.num_own_tokens < self._block_size:
            self._partial.remove(record)
