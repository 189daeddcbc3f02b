"""Host memory of records, with a checksum of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Sums: TypeAlias = npt.NDArray[np.int64]


class RecordMemory:
    """Slots of records, and the checksum of each record.

    The checksum is the sum of a record's words modulo 2^64: it differs after any change of one word, and is
    the same whether CPU or device adds it up. A CRC takes several times as long.

    Args:
        slots: the records, ``[num_slots, slot_bytes]``; an attribute too.
        record_bytes: of a block, and of a row.
        parts: bytes of each part of a record that is added up alone; words divide them.

    Attributes:
        sums: of each record, at its first slot, int64 ``[num_slots]``.
        word_bytes: bytes of a word: 8, or fewer where parts are no whole words.
    """

    def __init__(self, slots: Bytes, record_bytes: tuple[int, int], parts: Sequence[int] = ()) -> None:
        self.slots, self._record_bytes = slots, record_bytes
        self.sums: Sums = np.zeros(len(slots), np.int64)
        self.word_bytes = math.gcd(8, slots.shape[1], *record_bytes, *parts)
        self._word = np.dtype(f"i{self.word_bytes}")

    def sums_of(self, data: Bytes) -> Sums:
        """Return the sums of pieces of records, ``[n, bytes]``: int64 ``[n]``."""
        found: Sums = data.view(self._word).sum(1, dtype=np.int64)
        return found

    def seal(self, slots: Sequence[int], *, is_row: bool) -> None:
        """Note the checksum of a record that is in its slots."""
        self.sums[slots[0]] = self._sum(slots, is_row=is_row)

    def is_sound(self, slots: Sequence[int], *, is_row: bool) -> bool:
        """Whether a record has its checksum."""
        return bool(self._sum(slots, is_row=is_row) == self.sums[slots[0]])

    def _sum(self, slots: Sequence[int], *, is_row: bool) -> np.int64:
        left, size = self._record_bytes[is_row], self.slots.shape[1]
        total = np.zeros(1, np.int64)
        for slot in slots:
            total += self.sums_of(self.slots[slot : slot + 1, : min(left, size)])
            left = max(0, left - size)
        return np.int64(total[0])
