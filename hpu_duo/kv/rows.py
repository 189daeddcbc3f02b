"""Leases of ring rows, kept dense; no tensors, only ids."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


@dataclass(frozen=True)
class RowMove(Generic[Owner]):
    """``owner`` has moved from row ``src`` to row ``dst``; its ring must follow."""

    owner: Owner
    src: int
    dst: int


class RowPool(Generic[Owner]):
    """Hands out rows ``0 .. num_rows - 1``, the lowest free one first, one owner each.

    After ``compact`` the ``n`` used rows are exactly ``[0, n)``, so a step over ``n`` requests works on
    a leading slice of the ring store. The store has one row more, the *trash row* ``num_rows``, which
    padding points at and which is never handed out.
    """

    def __init__(self, num_rows: int) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows must be 1 or more, got {num_rows}")
        self.num_rows = num_rows
        self._owners: list[Owner | None] = [None] * num_rows
        self._free = list(range(num_rows))

    @property
    def trash_row(self) -> int:
        """The row that padding points at."""
        return self.num_rows

    @property
    def num_free(self) -> int:
        """Rows without an owner."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Rows with an owner."""
        return self.num_rows - len(self._free)

    @property
    def is_dense(self) -> bool:
        """Whether the used rows are exactly the first ``num_used`` ones."""
        return not self._free or self._free[0] == self.num_used

    def owner(self, row: int) -> Owner | None:
        """The owner of ``row``; None when it is free."""
        return self._owners[row]

    def acquire(self, owner: Owner) -> int:
        """Lease the lowest free row to ``owner``.

        Raises:
            ValueError: every row is taken.
        """
        if not self._free:
            raise ValueError(f"asked for a row, all {self.num_rows} are taken")
        row = heappop(self._free)
        self._owners[row] = owner
        return row

    def release(self, row: int) -> None:
        """Free ``row``; this may leave a hole until the next ``compact`` or ``acquire``.

        Raises:
            ValueError: the row is free already, or is no row of this pool.
        """
        if not 0 <= row < self.num_rows or self._owners[row] is None:
            raise ValueError(f"row {row} is not a used row of {self.num_rows}")
        self._owners[row] = None
        heappush(self._free, row)

    def compact(self) -> list[RowMove[Owner]]:
        """Move the highest used row into the lowest hole until there is no hole.

        Returns:
            The moves in the order they must be carried out; sources lie at or above ``num_used``,
            destinations below it, so no move reads what another one wrote.
        """
        if self.is_dense:
            return []
        used = self.num_used
        holes = (row for row in range(used) if self._owners[row] is None)
        moves = []
        for src in range(self.num_rows - 1, used - 1, -1):
            owner = self._owners[src]
            if owner is None:
                continue
            dst = next(holes)
            self._owners[dst], self._owners[src] = owner, None
            moves.append(RowMove(owner, src, dst))
        self._free = list(range(used, self.num_rows))  # ascending, hence already a heap
        return moves
