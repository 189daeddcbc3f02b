"""Orders in which records of host memory are evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

from hpu_duo.kv.tiers.host import EvictionOrder, Record, RecordKey


class LeastRecentlyUsed:
    """Evicts the record whose last use is the longest ago."""

    def __init__(self) -> None:
        self._records: OrderedDict[RecordKey, Record] = OrderedDict()

    def add(self, record: Record) -> None:
        """Add a record that is used now."""
        self._records[record.key] = record

    def use(self, record: Record) -> None:
        """Note a use of a record."""
        self._records.move_to_end(record.key)

    def remove(self, record: Record, *, is_evicted: bool) -> None:
        """Remove a record."""
        del self._records[record.key]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())


class Arc:
    """Adaptive replacement cache (Megiddo and Modha, 2003).

    One LRU list has records that were used once, the other those that were used again. Keys of recently
    evicted records are remembered (ghost lists): a hit there enlarges the list that the record was evicted
    from. A scan of new texts therefore does not evict frequently used records.

    Args:
        num_slots: of the tier.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        # Records used once, and again; then the keys and slots of those that were evicted.
        self._once: OrderedDict[RecordKey, Record] = OrderedDict()
        self._again: OrderedDict[RecordKey, Record] = OrderedDict()
        self._gone_once: OrderedDict[RecordKey, int] = OrderedDict()
        self._gone_again: OrderedDict[RecordKey, int] = OrderedDict()
        self._num_once = self._num_gone_once = self._num_gone_again = 0
        self._share = 0.0

    def add(self, record: Record) -> None:
        """Add a record that is used now; one that was evicted lately counts as used again."""
        key, size = record.key, len(record.slots)
        once, again = max(1, self._num_gone_once), max(1, self._num_gone_again)
        if key in self._gone_once:
            self._share = min(self._num_slots, self._share + size * max(1.0, again / once))
            self._num_gone_once -= self._gone_once.pop(key)
        elif key in self._gone_again:
            self._share = max(0.0, self._share - size * max(1.0, once / again))
            self._num_gone_again -= self._gone_again.pop(key)
        else:
            self._once[key] = record
            self._num_once += size
            return
        self._again[key] = record

    def use(self, record: Record) -> None:
        """Note a use of a record."""
        if self._once.pop(record.key, None) is not None:
            self._num_once -= len(record.slots)
        self._again[record.key] = record
        self._again.move_to_end(record.key)

    def remove(self, record: Record, *, is_evicted: bool) -> None:
        """Remove a record; its key is remembered if it was evicted."""
        key, size = record.key, len(record.slots)
        if self._once.pop(key, None) is not None:
            self._num_once -= size
            if is_evicted:
                self._gone_once[key] = size
                self._num_gone_once += size
        else:
            del self._again[key]
            if is_evicted:
                self._gone_again[key] = size
                self._num_gone_again += size
        while self._num_gone_once and self._num_once + self._num_gone_once > self._num_slots:
            self._num_gone_once -= self._gone_once.popitem(last=False)[1]
        while self._num_gone_again > self._num_slots:
            self._num_gone_again -= self._gone_again.popitem(last=False)[1]

    def __iter__(self) -> Iterator[Record]:
        excess, number = self._num_once - self._share, 0
        for record in self._once.values():
            if excess <= 0:
                break
            excess, number = excess - len(record.slots), number + 1
            yield record
        yield from self._again.values()
        yield from islice(self._once.values(), number, None)


class LeastValue:
    """Evicts the record that saves the fewest tokens a slot, divided by the time since its last use.

    A block saves its tokens, a snapshot those of the prefix that it ends. Records are in one list for each
    power of two of tokens a slot, so that few are compared.
    """

    def __init__(self) -> None:
        self._lists: dict[int, OrderedDict[RecordKey, tuple[Record, int]]] = {}
        self._time = 0

    def _list(self, record: Record) -> OrderedDict[RecordKey, tuple[Record, int]]:
        saved = record.num_tokens if record.key.is_row else record.num_own_tokens
        return self._lists.setdefault((saved // len(record.slots)).bit_length(), OrderedDict())

    def add(self, record: Record) -> None:
        """Add a record that is used now."""
        self._time += 1
        self._list(record)[record.key] = record, self._time

    def use(self, record: Record) -> None:
        """Note a use of a record."""
        self._list(record).pop(record.key)
        self.add(record)

    def remove(self, record: Record, *, is_evicted: bool) -> None:
        """Remove a record."""
        del self._list(record)[record.key]

    def __iter__(self) -> Iterator[Record]:
        left = {size: iter(each.values()) for size, each in self._lists.items()}
        heads = {size: next(each, None) for size, each in left.items()}
        while found := [
            (2.0**size / (1 + self._time - head[1]), size, head[0])
            for size, head in heads.items()
            if head is not None
        ]:
            _, size, record = min(found, key=lambda each: each[:2])
            heads[size] = next(left[size], None)
            yield record


ORDERS: dict[str, Callable[[int], EvictionOrder]] = {
    "lru": lambda _: LeastRecentlyUsed(),
    "arc": Arc,
    "value": lambda _: LeastValue(),
}
"""Makes an order by its name, for a number of slots."""
