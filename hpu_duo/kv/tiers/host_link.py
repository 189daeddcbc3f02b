"""Records in host memory, and the threads that move them."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hpu_duo.kv.row_state import Units
from hpu_duo.kv.tiers.link import Landed, Transfer, Transfers
from hpu_duo.kv.tiers.rank_disk import RankDisk
from hpu_duo.not_picklable import NotPicklable

Bytes: TypeAlias = npt.NDArray[np.uint8]


class HostRecords(NotPicklable):
    """Records in host memory, and the tensors whose units they hold.

    Args:
        blocks, rows: tensors of the stores.
        num_slots: slots of the records.
        slot_bytes: bytes of each.

    Attributes:
        slots: the records, ``[num_slots, slot_bytes]``.
        disk: reads and writes them, where several ranks do so together.

    Raises:
        MemoryError: the system has no such range of addresses.
    """

    def __init__(
        self, blocks: Sequence[Units], rows: Sequence[Units], num_slots: int, slot_bytes: int
    ) -> None:
        self._tensors = {False: tuple(blocks), True: tuple(rows)}
        self._device = next(each.tensor.device for each in (*blocks, *rows))
        try:
            memory = mmap.mmap(-1, num_slots * slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(
                f"expected room for {num_slots * slot_bytes:,} bytes of records: {error}"
            ) from error
        self.slots: Bytes = np.frombuffer(memory, np.uint8).reshape(num_slots, slot_bytes)
        self.disk: RankDisk | None = None

    def _begin_disk(self, transfers: Transfers) -> None:
        if transfers.disk is not None:
            assert self.disk is not None, "expected a folder"
            self.disk.begin(transfers.disk)

    def poison(self, transfer: Transfer) -> None:
        """Fill a unit with ones in every bit: not a number in every float format."""
        unit = torch.tensor([transfer.unit], dtype=torch.int32, device=self._device)
        for each in self._tensors[transfer.is_row]:
            num_bytes = math.prod(each.shape) * each.tensor.dtype.itemsize
            ones = torch.full((1, num_bytes), 0xFF, dtype=torch.uint8).view(each.tensor.dtype)
            each.write(unit, ones.view(1, *each.shape).to(self._device))


class HostLink(HostRecords):
    """Transfers by two threads, one for each direction.

    On a CPU the threads copy between units and records. On devices that do not copy while they compute, they
    copy between host buffers and records. There a unit is copied on the device when its transfer begins, that
    copy is read at the next step border, and a record that arrives is written to its unit when ``wait`` is
    called for it.

    Args:
        blocks, rows, num_slots, slot_bytes: see ``HostRecords``.
        padded: number of blocks, and of rows, that operators on the device have; None = as many as move.
    """

    def __init__(
        self,
        blocks: Sequence[Units],
        rows: Sequence[Units],
        num_slots: int,
        slot_bytes: int,
        padded: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(blocks, rows, num_slots, slot_bytes)
        self._padded = padded
        self._up, self._down = (ThreadPoolExecutor(1, f"hpu-duo-{name}") for name in ("kv-store", "kv-load"))
        self._flying: dict[tuple[Transfer, bool], Future[float]] = {}
        # Copies of units on the device that have not been read.
        self._leaving: list[tuple[Sequence[Transfer], list[torch.Tensor]]] = []
        # Records that wait in host memory for their copy to a unit.
        self._arrived: dict[Transfer, Bytes] = {}

    @property
    def _has_stream(self) -> bool:
        return self._device.type != "cpu"

    def begin(self, transfers: Transfers) -> None:
        """Begin the transfers of a step."""
        self._begin_disk(transfers)
        self._read_leaving()
        for is_row in (False, True):
            for is_load, each in ((False, transfers.stores), (True, transfers.loads)):
                batch = tuple(transfer for transfer in each if transfer.is_row is is_row)
                if not batch:
                    continue
                if not self._tensors[is_row]:  # heads that need them are on other ranks
                    self._submit(self._down, lambda _: None, batch, is_load=is_load)
                elif is_load:
                    self._submit(self._down, self._load, batch, is_load=True)
                elif self._has_stream:
                    self._leaving.append((batch, self._gathered(batch)))
                else:
                    self._submit(self._up, partial(self._store, None), batch, is_load=False)

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        move: Callable[[Sequence[Transfer]], None],
        batch: Sequence[Transfer],
        *,
        is_load: bool,
    ) -> None:
        future = pool.submit(_timed, move, batch)
        for transfer in batch:
            self._flying[transfer, is_load] = future

    def _read_leaving(self) -> None:
        """Read the copies that the device has made of units."""
        leaving, self._leaving = self._leaving, []
        for batch, parts in leaving:
            on_host = [part.cpu() for part in parts]
            self._submit(self._up, partial(self._store, on_host), batch, is_load=False)

    def poll(self) -> list[Landed]:
        """Return the transfers that have ended.

        Raises:
            Exception: of a transfer.
        """
        self._read_leaving()
        return [
            Landed(transfer, is_load, self._flying.pop((transfer, is_load)).result())
            for (transfer, is_load), future in list(self._flying.items())
            if future.done()
        ]

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Wait until transfers have ended, and forget them."""
        self._read_leaving()
        for key in list(self._flying):
            if key[0] in transfers:
                self._flying.pop(key).result()
        for is_row in (False, True) if self._arrived else ():
            batch = [each for each in transfers if each.is_row is is_row and each in self._arrived]
            self._fill(batch, np.array([self._arrived.pop(each) for each in batch]))

    def wait_any(self, others: Sequence[Future[Any]] = ()) -> None:
        """Wait until one more has ended, or another thread's work."""
        self._read_leaving()
        wait({*self._flying.values(), *others}, return_when=FIRST_COMPLETED)

    def drain(self) -> None:
        """Wait for all, and forget them."""
        wait(set(self._flying.values()))
        self._leaving.clear()
        self._flying.clear()
        self._arrived.clear()

    def warm_up(self) -> None:
        """Run the operators of the device once, from null units to null units."""
        if self._padded is None:
            return
        for is_row, tensors in self._tensors.items():
            if tensors:
                null = Transfer(is_row, tensors[0].null_unit, ())
                parts = [part.cpu() for part in self._gathered([null])]
                self._fill([null], _record_of([part[:1] for part in parts]))

    @torch.inference_mode()
    def _gathered(self, batch: Sequence[Transfer]) -> list[torch.Tensor]:
        """Copies of units, ``[n, ...]`` of each tensor."""
        tensors = self._tensors[batch[0].is_row]
        units = self._units(batch)
        return [each.read(units) for each in tensors]

    @torch.inference_mode()
    def _store(self, parts: Sequence[torch.Tensor] | None, batch: Sequence[Transfer]) -> None:
        parts = self._gathered(batch) if parts is None else parts
        found = _record_of([part.cpu()[: len(batch)] for part in parts])
        data = np.zeros((len(batch), len(batch[0].slots) * self.slots.shape[1]), np.uint8)
        data[:, : found.shape[1]] = found
        places = np.array([each.slots for each in batch]).reshape(-1)
        self.slots[places] = data.reshape(-1, self.slots.shape[1])

    def _load(self, batch: Sequence[Transfer]) -> None:
        places = np.array([each.slots for each in batch]).reshape(-1)
        data = self.slots[places].reshape(len(batch), -1)
        if self._has_stream:
            self._arrived.update(zip(batch, data))
        else:
            self._fill(batch, data)

    @torch.inference_mode()
    def _fill(self, batch: Sequence[Transfer], data: Bytes) -> None:
        """Copy records, ``[n, bytes]``, to their units."""
        for begin, end in self._chunks(batch):
            units, start = self._units(batch[begin:end]), 0
            for each in self._tensors[batch[0].is_row]:
                dtype, shape = each.tensor.dtype, each.shape
                width = math.prod(shape) * dtype.itemsize
                part = torch.zeros((len(units), width), dtype=torch.uint8)
                part[: end - begin] = torch.from_numpy(data[begin:end, start : start + width])
                shaped = part.view(dtype).view(len(units), *shape)
                each.write(units, shaped.to(self._device, non_blocking=True))
                start += width

    def _chunks(self, batch: Sequence[Transfer]) -> Iterator[tuple[int, int]]:
        size = len(batch) if self._padded is None else self._padded[bool(batch) and batch[0].is_row]
        for begin in range(0, len(batch), max(1, size)):
            yield begin, min(len(batch), begin + size)

    def _units(self, batch: Sequence[Transfer]) -> torch.Tensor:
        is_row = batch[0].is_row
        units = [each.unit for each in batch]
        if self._padded is not None:
            null = self._tensors[is_row][0].null_unit
            units += [null] * (self._padded[is_row] - len(units))
        return torch.tensor(units, dtype=torch.int32).to(self._device)


def _record_of(parts: Sequence[torch.Tensor]) -> Bytes:
    """Return units ``[n, ...]`` of all tensors as bytes, ``[n, bytes]``."""
    flat = [part.reshape(len(part), -1).contiguous() for part in parts]
    return np.concatenate([part.view(torch.uint8).numpy() for part in flat], axis=1)


def _timed(move: Callable[[Sequence[Transfer]], None], batch: Sequence[Transfer]) -> float:
    began = time.perf_counter()
    move(batch)
    return (time.perf_counter() - began) / len(batch)
