"""A link, and a disk, that move the slots of a simulated device when told to."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hpu_duo.kv.tiers.disk import DiskThreads, Scanned, SegmentFolder
from hpu_duo.kv.tiers.link import Landed, Transfer, Transfers
from hpu_duo.kv.tiers.records import RecordMemory
from hpu_duo.kv.tiers.segments import PAGE, RECORD_START
from tests.engine_host.simulated_device import SimulatedDevice, Slot

SLOT_BYTES = 96
"""A slot of the host has a block of four tokens, or a ring of five; a ring may have two of them."""

T = TypeVar("T")


@dataclass(eq=False)
class Flight:
    """A transfer, or work of the disk, on its way."""

    transfer: Transfer
    is_load: bool
    num_polls: int = 0


class SlotLink:
    """Moves slots of a simulated device when told to; units of transfers on their way are empty.

    Args:
        memory: of the host, slots ``[num_slots, SLOT_BYTES]``.
        most_polls: a transfer lands after so many polls at the latest.

    Attributes:
        num_landed: transfers that a poll has returned, by ``is_load``, ``is_row`` and first slot.
    """

    def __init__(self, device: SimulatedDevice, memory: RecordMemory, most_polls: int = 6) -> None:
        self.device, self.memory, self.slots, self.most_polls = device, memory, memory.slots, most_polls
        self.flying: list[Flight] = []
        self.next: list[int] = []
        self.fails = False
        self.disk: SlotDisk | None = None
        self.num_landed: Counter[tuple[bool, bool, int]] = Counter()

    def _units(self, transfer: Transfer) -> list[list[Slot]]:
        return self.device.rings if transfer.is_row else self.device.blocks

    def begin(self, transfers: Transfers) -> None:
        for is_load, each in ((False, transfers.stores), (True, transfers.loads)):
            for transfer in each:
                assert all(
                    transfer.unit != other.unit or transfer.is_row != other.is_row for other in self.open
                )
                self.flying.append(Flight(transfer, is_load))
                if is_load:
                    units = self._units(transfer)
                    units[transfer.unit] = [None] * len(units[transfer.unit])

    @property
    def open(self) -> list[Transfer]:
        return [each.transfer for each in self.flying]

    def poll(self) -> list[Landed]:
        if self.disk is not None:
            self.disk.advance()
        if self.fails:
            self.fails = False
            raise OSError("a transfer")
        for each in self.flying:
            each.num_polls += 1
        wanted = [self.flying[number % len(self.flying)] for number in self.next if self.flying]
        self.next = []
        landed = [each for each in self.flying if each in wanted or each.num_polls > self.most_polls]
        for each in landed:
            self.num_landed[each.is_load, each.transfer.is_row, each.transfer.slots[0]] += 1
        return self._land(landed)

    def _land(self, landed: list[Flight]) -> list[Landed]:
        found = []
        for each in landed:
            self.flying.remove(each)
            transfer, is_load = each.transfer, each.is_load
            units, slots = self._units(transfer), list(transfer.slots)
            width, is_damaged = len(units[transfer.unit]), False
            if is_load:
                is_damaged = not self.memory.is_sound(slots, is_row=transfer.is_row)
                units[transfer.unit] = _decoded(self.slots[slots], width)
            else:
                self.slots[slots] = _encoded(units[transfer.unit], len(slots))
                self.memory.seal(slots, is_row=transfer.is_row)
                units[transfer.unit] = [None] * width
            found.append(Landed(transfer, is_load, 1.0, is_damaged))
        return found

    def wait(self, transfers: Sequence[Transfer]) -> None:
        assert not set(transfers) & set(self.open)

    def wait_any(self, others: Sequence[Future[Any]] = ()) -> None:
        for each in self.flying[:1]:
            each.num_polls = self.most_polls
        if self.disk is not None:
            self.disk.end_first()

    def drain(self) -> None:
        self._land(list(self.flying))

    def warm_up(self) -> None:
        raise AssertionError("nothing is compiled")


def _encoded(unit: list[Slot], num_slots: int) -> npt.NDArray[np.uint8]:
    data = np.full(num_slots * SLOT_BYTES // 8, -1, np.int64)
    data[: 2 * len(unit)] = np.array([(-1, -1) if slot is None else slot for slot in unit]).reshape(-1)
    return data.view(np.uint8).reshape(num_slots, SLOT_BYTES)


def _decoded(data: npt.NDArray[np.uint8], width: int) -> list[Slot]:
    pairs = data.reshape(-1).view(np.int64)[: 2 * width].reshape(-1, 2).tolist()
    return [None if position < 0 else (position, checksum) for position, checksum in pairs]


class SlotDisk(DiskThreads):
    """Reads and writes a folder when told to, in whatever order, and fails when told to.

    Args:
        most_polls: work ends after so many polls at the latest.

    Attributes:
        next: numbers of the work that ends with the next poll.
        error: of the work that ends next; None = it does not fail.
        written_bytes, read_bytes: payloads that were moved.
    """

    def __init__(self, folder: SegmentFolder, memory: RecordMemory, most_polls: int = 6) -> None:
        super().__init__(folder, memory)
        self._writer = self._readers = self  # type: ignore[assignment]
        self.most_polls = most_polls
        self._pending: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._num_polls: dict[Future[Any], int] = {}
        self.next: list[int] = []
        self.error: Exception | None = None
        self.written_bytes = self.read_bytes = 0

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        future: Future[T] = Future()
        self._pending.append((future, lambda: function(*arguments)))
        self._num_polls[future] = 0
        return future

    def scan(self) -> Future[Scanned]:
        future: Future[Scanned] = Future()
        future.set_result(self._folder.scan())
        return future

    def _write(self, batch: Any) -> Any:
        written = super()._write(batch)
        self.written_bytes += sum(stored.num_bytes for stored in written.stored)
        return written

    def _read(self, stored: Any, record: Any) -> float:
        super()._read(stored, record)
        self.read_bytes += stored.num_bytes
        return 0.0

    def advance(self) -> None:
        for future, _ in self._pending:
            self._num_polls[future] += 1
        wanted = {number % len(self._pending) for number in self.next if self._pending}
        self.next = []
        for number, (future, work) in enumerate(tuple(self._pending)):
            if number in wanted or self._num_polls[future] > self.most_polls:
                self._end(future, work)

    def end_first(self) -> None:
        for future, _ in self._pending[:1]:
            self._num_polls[future] = self.most_polls

    def _end(self, future: Future[Any], work: Callable[[], Any]) -> None:
        self._pending.remove((future, work))
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
            future.set_result(work())
        except Exception as found:
            future.set_exception(found)

    def forget(self) -> None:
        for future, work in tuple(self._pending):
            self._end(future, work)

    def _files(self) -> list[Any]:
        return sorted(self.path.glob("*.kv"))

    def damage(self, number: int) -> None:
        """Change a byte of a header, or of a record."""
        if files := self._files():
            with files[number % len(files)].open("r+b") as file:
                num_pages = os.fstat(file.fileno()).st_size // PAGE
                file.seek(number % num_pages * PAGE + number % (RECORD_START + SLOT_BYTES))
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))

    def drop_a_segment(self, number: int) -> None:
        if files := self._files():
            files[number % len(files)].unlink()

    def close(self) -> None:
        self.forget()
        self._folder.release()
