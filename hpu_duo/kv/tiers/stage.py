"""Units of the stores that are reserved for transfers, and the transfers of the next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpu_duo.kv.pool import BlockCopy, Copy, RowCopy
from hpu_duo.kv.tiers.link import Landed, Link, Transfer, Transfers


class Stage:
    """Reserved blocks and rows, half of them for each direction, and a link that moves them.

    A unit that leaves is copied to a reserved one with the other copies of the next step, so it is free at
    once, and from there to the host while that step and later ones run. A unit that arrives is copied from a
    reserved one to its place.

    Args:
        link: moves the bytes; an attribute too.
        units: ids of blocks, and of rows, that are reserved.
        add_copy: requests a copy.
    """

    def __init__(
        self, link: Link, units: tuple[Sequence[int], Sequence[int]], add_copy: Callable[[Copy], None]
    ) -> None:
        self.link = link
        self._units, self._add_copy = units, add_copy
        self._ended: dict[tuple[Transfer, bool], Callable[[Landed], None]] = {}
        self._reset()

    def _reset(self) -> None:
        # Free units by direction and kind.
        self._free = {
            (is_load, is_row): list(units[is_load::2])
            for is_row, units in enumerate(self._units)
            for is_load in (False, True)
        }
        self._stores: list[Transfer] = []
        self._loads: list[Transfer] = []
        self._landed: list[Transfer] = []
        self._ended.clear()

    @property
    def is_busy(self) -> bool:
        """Whether any transfer has not landed."""
        return bool(self._ended)

    @property
    def num_open(self) -> int:
        """Number of transfers that have not landed."""
        return len(self._ended)

    @property
    def has_begun(self) -> bool:
        """Whether any unit waits for the next step, which copies it to the host."""
        return bool(self._stores)

    @property
    def is_moving(self) -> bool:
        """Whether any transfer of a step that has run has not landed."""
        return len(self._ended) > len(self._stores) + len(self._loads)

    def num_free(self, *, is_load: bool, is_row: bool) -> int:
        """Return how many more transfers can begin."""
        return len(self._free[is_load, is_row])

    def num_units(self, *, is_row: bool) -> int:
        """Return how many units are reserved, for both directions together."""
        return len(self._units[is_row])

    def store(
        self, unit: int, slots: tuple[int, ...], ended: Callable[[Landed], None], *, is_row: bool
    ) -> None:
        """Copy a unit to slots; a unit for it must be free.

        Args:
            ended: called when it has landed.
        """
        staged = self._free[False, is_row].pop()
        self._add_copy(RowCopy(unit, staged) if is_row else BlockCopy(unit, staged))
        transfer = Transfer(is_row, staged, slots)
        self._stores.append(transfer)
        self._ended[transfer, False] = ended

    def load(self, slots: tuple[int, ...], ended: Callable[[Landed], None], *, is_row: bool) -> int:
        """Copy slots to a reserved unit, whose id is returned; one must be free, and is until ``release``."""
        staged = self._free[True, is_row].pop()
        transfer = Transfer(is_row, staged, slots)
        self._loads.append(transfer)
        self._ended[transfer, True] = ended
        return staged

    def place(self, staged: int, unit: int, *, is_row: bool) -> None:
        """Copy what has arrived in a reserved unit to another one, and release it."""
        self._add_copy(RowCopy(staged, unit) if is_row else BlockCopy(staged, unit))
        self.release(staged, is_row=is_row)

    def release(self, staged: int, *, is_row: bool) -> None:
        """Free the unit of a load that has landed."""
        self._free[True, is_row].append(staged)

    def take(self) -> Transfers | None:
        """Return the transfers of the next step; None if there are none."""
        stores, self._stores = self._stores, []
        loads, self._loads = self._loads, []
        landed, self._landed = self._landed, []
        return Transfers(tuple(stores), tuple(loads), tuple(landed)) if stores or loads or landed else None

    def poll(self) -> None:
        """Call ``ended`` of the transfers that have landed.

        Raises:
            Exception: of a transfer.
        """
        for landed in self.link.poll():
            transfer = landed.transfer
            self._landed.append(transfer)
            if not landed.is_load:
                self._free[False, transfer.is_row].append(transfer.unit)
            self._ended.pop((transfer, landed.is_load))(landed)

    def forget(self) -> None:
        """Wait for all transfers, and forget them."""
        self.link.drain()
        self._reset()
