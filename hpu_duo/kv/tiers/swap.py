"""Room in host memory for requests that were preempted: their blocks and their row, as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from hpu_duo.kv.tiers.link import Landed
from hpu_duo.kv.tiers.stage import Stage
from hpu_duo.request import Request


class PreemptionMode(Enum):
    """The way in which a preempted request comes back."""

    RECOMPUTE = "recompute"
    """Its tokens are computed again, but what the prefix cache has of them."""
    SWAP = "swap"
    """Its blocks and its row are copied to host memory, and back."""
    AUTO = "auto"
    """Either, whichever is predicted to be faster."""


@dataclass
class SwapCounters:
    """Totals of swapping.

    Attributes:
        num_out, num_in: requests that have left, and have come back.
        out_bytes, in_bytes: of their blocks and rows.
        num_recomputed: preempted requests that were not swapped: no room, or predicted to be slower.
        num_lost: swapped requests that are computed again, because a transfer or a step has failed.
        num_damaged: of them, those of which a block or a row on the host did not have its checksum.
    """

    num_out: int = 0
    num_in: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    num_recomputed: int = 0
    num_lost: int = 0
    num_damaged: int = 0


@dataclass(eq=False)
class Swapped:
    """A request that leaves the device, is on the host, or comes back.

    Attributes:
        request: whose ``num_computed_tokens`` stay what they are.
        blocks: slot of each of its blocks, in order.
        row: slots of its row; empty if rows have no state.
        num_flying: transfers that have not landed.
        is_leaving: whether it has a row whose state is not copied yet, or blocks.
        num_begun: when it comes back, the units whose transfer has begun: blocks, then the row.
        num_placed: those of them that have been copied to its own units.
        arrived: of the others, units that have landed: number, and the reserved unit.
        is_dropped: whether nobody needs its slots any more.
    """

    request: Request
    blocks: list[int]
    row: tuple[int, ...]
    num_flying: int = 0
    is_leaving: bool = True
    num_begun: int = 0
    num_placed: int = 0
    arrived: list[tuple[int, int]] = field(default_factory=list)
    is_dropped: bool = False

    @property
    def num_units(self) -> int:
        """Number of its blocks and rows."""
        return len(self.blocks) + bool(self.row)


class SwapSpace:
    """Copies preempted requests to slots of host memory, and back, beside steps.

    Args:
        stage: of transfers, shared with the tier of the prefix cache.
        slots: ids of the slots.
        slots_per_row: that a row fills; 0 where rows have no state.
        slot_bytes: bytes of a slot.
    """

    def __init__(self, stage: Stage, slots: range, slots_per_row: int, slot_bytes: int) -> None:
        self.counters, self.num_slots, self.slot_bytes = SwapCounters(), len(slots), slot_bytes
        self._stage, self._per_row = stage, slots_per_row
        self._all, self._slots = slots, list(reversed(slots))
        self._lost: list[Request] = []
        self._swapped: dict[Request, Swapped] = {}

    def __len__(self) -> int:
        return len(self._swapped)

    @property
    def num_used_slots(self) -> int:
        """Number of slots of requests."""
        return self.num_slots - len(self._slots)

    @property
    def is_moving(self) -> bool:
        """Whether any request leaves or comes back, or a transfer is on its way."""
        return any(each.is_leaving or each.num_begun or each.num_flying for each in self._swapped.values())

    @property
    def leaving(self) -> list[Request]:
        """Requests that leave, and still have blocks or a row."""
        return [each.request for each in self._swapped.values() if each.is_leaving]

    def has(self, request: Request) -> bool:
        """Whether a request is swapped."""
        return request in self._swapped

    def num_bytes(self, num_blocks: int) -> int:
        """Return the bytes of a request with so many blocks."""
        return (num_blocks + self._per_row) * self.slot_bytes

    def begin(self, request: Request) -> bool:
        """Begin to swap a request out, which has only the blocks of its computed tokens.

        Returns:
            False, and nothing has changed, without room.
        """
        needed = request.num_blocks + self._per_row
        if needed > len(self._slots):
            return False
        slots = [self._slots.pop() for _ in range(needed)]
        number = request.num_blocks
        self._swapped[request] = Swapped(request, slots[:number], tuple(slots[number:]))
        return True

    def leave(self, request: Request, free_block: Callable[[Request], None]) -> bool:
        """Copy the next units of a request that leaves, the last block first; whether all have been copied.

        Args:
            free_block: frees the last block of a request.
        """
        swapped = self._swapped[request]
        while request.num_blocks and self._stage.num_free(is_load=False, is_row=False):
            ordinal = request.num_blocks - 1
            self._store(swapped, int(request.block_table[ordinal]), (swapped.blocks[ordinal],), is_row=False)
            free_block(request)
        if request.num_blocks:
            return False
        if swapped.row:
            if not self._stage.num_free(is_load=False, is_row=True):
                return False
            self._store(swapped, request.row, swapped.row, is_row=True)
        swapped.is_leaving = False
        self.counters.num_out += 1
        return True

    def _store(self, swapped: Swapped, unit: int, slots: tuple[int, ...], *, is_row: bool) -> None:
        swapped.num_flying += 1
        self.counters.out_bytes += len(slots) * self.slot_bytes
        self._stage.store(unit, slots, lambda _: self._has_landed(swapped), is_row=is_row)

    def _has_landed(self, swapped: Swapped) -> None:
        swapped.num_flying -= 1
        if swapped.is_dropped:
            self._free(swapped)

    def is_there(self, request: Request) -> bool:
        """Whether all of a swapped request has reached the host."""
        swapped = self._swapped[request]
        return not swapped.is_leaving and not swapped.num_flying

    def bring(self, request: Request) -> bool:
        """Go on bringing a request back, which has a row and its blocks; whether it is back.

        To be called between steps, until it returns True, and before a step's transfers are taken.
        """
        swapped = self._swapped[request]
        num_blocks, arrived = len(swapped.blocks), swapped.arrived
        for number, staged in arrived:
            is_row = number == num_blocks
            unit = request.row if is_row else int(request.block_table[number])
            self._stage.place(staged, unit, is_row=is_row)
        swapped.num_placed += len(arrived)
        arrived.clear()
        while swapped.num_begun < swapped.num_units:
            number = swapped.num_begun
            is_row = number == num_blocks
            if not self._stage.num_free(is_load=True, is_row=is_row):
                break
            self._load(swapped, number, swapped.row if is_row else (swapped.blocks[number],), is_row=is_row)
        if swapped.num_placed < swapped.num_units:
            return False
        self.counters.num_in += 1
        self.drop(request)
        return True

    def _load(self, swapped: Swapped, number: int, slots: tuple[int, ...], *, is_row: bool) -> None:
        def ended(landed: Landed) -> None:
            if landed.is_damaged and not swapped.is_dropped:
                self._lose(swapped)
            if swapped.is_dropped or not swapped.num_begun:
                self._stage.release(staged, is_row=is_row)
            else:
                swapped.arrived.append((number, staged))
            self._has_landed(swapped)

        swapped.num_begun += 1
        swapped.num_flying += 1
        self.counters.in_bytes += len(slots) * self.slot_bytes
        staged = self._stage.load(slots, ended, is_row=is_row)

    def stop(self, request: Request) -> None:
        """Bring a request back later; it stays on the host."""
        swapped = self._swapped[request]
        for number, staged in swapped.arrived:
            self._stage.release(staged, is_row=number == len(swapped.blocks))
        swapped.arrived.clear()
        swapped.num_begun = swapped.num_placed = 0

    def drop(self, request: Request) -> None:
        """Free the slots of a request, if it has any, once nothing of it is on its way."""
        swapped = self._swapped.pop(request, None)
        if swapped is None:
            return
        for number, staged in swapped.arrived:
            self._stage.release(staged, is_row=number == len(swapped.blocks))
        swapped.arrived.clear()
        swapped.is_dropped = True
        self._free(swapped)

    def _free(self, swapped: Swapped) -> None:
        if not swapped.num_flying:
            self._slots += [*swapped.blocks, *swapped.row]

    def forget(self) -> None:
        """Drop everything, because transfers were lost; see ``take_lost``."""
        self._lost += self._swapped
        self.counters.num_lost += len(self._swapped)
        self._swapped.clear()
        self._slots = list(reversed(self._all))

    def _lose(self, swapped: Swapped) -> None:
        """Drop a request of which a record is damaged."""
        self.counters.num_damaged += 1
        self.counters.num_lost += 1
        self._lost.append(swapped.request)
        self.drop(swapped.request)

    def take_lost(self) -> list[Request]:
        """Return the requests whose content was lost since the last call."""
        lost, self._lost = self._lost, []
        return lost
