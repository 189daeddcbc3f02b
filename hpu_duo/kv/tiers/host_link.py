"""Records in host memory, and the threads that move them."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
import torch

from hpu_duo.kv.row_state import Units
from hpu_duo.kv.tiers.link import DamagedRecord, Landed, Transfer, Transfers
from hpu_duo.kv.tiers.rank_disk import RankDisk
from hpu_duo.kv.tiers.records import Bytes, RecordMemory, Sums
from hpu_duo.not_picklable import NotPicklable

STAGING_BYTES = 128 << 20
"""Most bytes that are gathered, or spread, by one set of operators; a record may have more."""
_ALIGNMENT = 64


def staging_bytes(block_bytes: int, row_bytes: int, most_blocks: int) -> int:
    """Return the bytes of the buffers of both directions, of a ``HostLink`` or a ``StreamLink``.

    Args:
        block_bytes, row_bytes: of a record.
        most_blocks: most blocks that move in one step and direction.
    """
    one = max(block_bytes, row_bytes, min(STAGING_BYTES, most_blocks * block_bytes))
    return 2 * -(-one // _ALIGNMENT) * _ALIGNMENT


class StagedRecords(NamedTuple):
    """A buffer as records, ``[n, bytes]``, and as units of each store, ``[n, ...]``."""

    records: torch.Tensor
    parts: tuple[torch.Tensor, ...]


class HostRecords(NotPicklable):
    """Records in host memory, and the tensors whose units they hold.

    A record has the bytes of its unit in all tensors, in ``RECORD_ORDER``.

    Args:
        blocks, rows: tensors of the stores.
        num_slots: slots of the records.
        slot_bytes: bytes of each.

    Attributes:
        memory: of the records.
        slots: its slots, ``[num_slots, slot_bytes]``.
        disk: reads and writes them, where several ranks do so together.

    Raises:
        MemoryError: the system has no such range of addresses.
    """

    def __init__(
        self, blocks: Sequence[Units], rows: Sequence[Units], num_slots: int, slot_bytes: int
    ) -> None:
        self._tensors = {
            False: tuple(sorted(blocks, key=_by_dtype)),
            True: tuple(sorted(rows, key=_by_dtype)),
        }
        self._device = next(each.tensor.device for each in (*blocks, *rows))
        try:
            memory = mmap.mmap(-1, num_slots * slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(
                f"expected room for {num_slots * slot_bytes:,} bytes of records: {error}"
            ) from error
        self.slots: Bytes = np.frombuffer(memory, np.uint8).reshape(num_slots, slot_bytes)
        parts = {is_row: [_bytes_of(each) for each in found] for is_row, found in self._tensors.items()}
        sizes = sum(parts[False]), sum(parts[True])
        self.memory = RecordMemory(self.slots, sizes, (*parts[False], *parts[True]))
        self.disk: RankDisk | None = None

    def _begin_disk(self, transfers: Transfers) -> None:
        if transfers.disk is not None:
            assert self.disk is not None, "expected a folder"
            self.disk.begin(transfers.disk)

    def _to_slots(self, batch: Sequence[Transfer], data: Bytes, begin: int = 0) -> None:
        """Copy ranges of records, ``[n, bytes]`` from byte ``begin`` on, to their slots; those at 0 first."""
        places = np.array([each.slots for each in batch])
        sums = self.memory.sums_of(data[: len(batch)])
        self.memory.sums[places[:, 0]] = sums + self.memory.sums[places[:, 0]] if begin else sums
        for number, own, part in self._pieces(begin, data.shape[1]):
            self.slots[places[:, number], own] = data[: len(batch), part]

    def _from_slots(self, batch: Sequence[Transfer], data: Bytes, begin: int = 0) -> Sums:
        """Fill a range of records from their slots, see ``_to_slots``; returns its sums, int64 ``[n]``."""
        places = np.array([each.slots for each in batch])
        for number, own, part in self._pieces(begin, data.shape[1]):
            data[: len(batch), part] = self.slots[places[:, number], own]
        return self.memory.sums_of(data[: len(batch)])

    def _damaged(self, batch: Sequence[Transfer], sums: Sums) -> frozenset[Transfer]:
        """Return the loads whose records have other checksums; sums of what was loaded, int64 ``[n]``."""
        expected = self.memory.sums[[each.slots[0] for each in batch]]
        return frozenset(batch[int(place)] for place in np.flatnonzero(sums != expected))

    def _pieces(self, begin: int, num_bytes: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield the slots of a range of a record: number, bytes of the slot, and bytes of the range."""
        size, end = self.slots.shape[1], begin + num_bytes
        for number in range(begin // size, -(-end // size)):
            start = number * size
            first, last = max(begin, start), min(end, start + size)
            yield number, slice(first - start, last - start), slice(first - begin, last - begin)

    def poison(self, transfer: Transfer) -> None:
        """Fill a unit with ones in every bit: not a number in every float format."""
        unit = torch.tensor([transfer.unit], dtype=torch.int32, device=self._device)
        for each in self._tensors[transfer.is_row]:
            ones = torch.full((1, _bytes_of(each)), 0xFF, dtype=torch.uint8).view(each.tensor.dtype)
            each.write(unit, ones.view(1, *each.shape).to(self._device))


class GatheredRecords(HostRecords):
    """Records whose units are gathered to a buffer on their device, and spread from one; one a direction.

    Args:
        blocks, rows, num_slots, slot_bytes: see ``HostRecords``.
        most_blocks: most blocks that move in one step and direction.

    Attributes:
        staging: both buffers, uint8 ``[2, bytes]``.
    """

    def __init__(
        self,
        blocks: Sequence[Units],
        rows: Sequence[Units],
        num_slots: int,
        slot_bytes: int,
        most_blocks: int = 1,
    ) -> None:
        super().__init__(blocks, rows, num_slots, slot_bytes)
        # A launch is a large part of what the host does for one tensor, so views are made once.
        self._stores = {is_row: list(map(_view, tensors)) for is_row, tensors in self._tensors.items()}
        self._record_bytes = {is_row: sum(map(_unit_bytes, views)) for is_row, views in self._stores.items()}
        num_bytes = staging_bytes(self._record_bytes[False], self._record_bytes[True], most_blocks)
        self.staging = torch.zeros((2, num_bytes // 2), dtype=torch.uint8, device=self._device)
        self._staged = {
            (is_load, is_row): self._stages(is_load=is_load, is_row=is_row)
            for is_load in (False, True)
            for is_row, views in self._stores.items()
            if views
        }

    def _stages(self, *, is_load: bool, is_row: bool) -> StagedRecords:
        width = self._record_bytes[is_row]
        number = self.staging.shape[1] // width
        records = self.staging[int(is_load), : number * width].view(number, width)
        parts, start = [], 0
        for view in self._stores[is_row]:
            size, item = _unit_bytes(view), view.element_size()
            # Bytes where numbers of the store would not be aligned.
            part = records[:, start : start + size]
            if not start % item and not width % item:
                numbers = part.view(view.dtype)
                part = numbers.unflatten(1, view.shape[1:]) if view.ndim > 1 else numbers[:, 0]
            parts.append(part)
            start += size
        return StagedRecords(records, tuple(parts))

    def _gather(self, staged: StagedRecords, units: torch.Tensor, *, is_row: bool) -> None:
        """Copy units to the first records of a buffer; ids int32 ``[n]``."""
        number = len(units)
        for view, part in zip(self._stores[is_row], staged.parts):
            if part.dtype == view.dtype:
                torch.index_select(view, 0, units, out=part[:number])
            else:
                part[:number].copy_(view.index_select(0, units).view(number, -1).view(torch.uint8))

    def _spread(self, staged: StagedRecords, units: torch.Tensor, *, is_row: bool) -> None:
        """Copy the first records of a buffer to units; ids int64 ``[n]``."""
        number = len(units)
        for view, part in zip(self._stores[is_row], staged.parts):
            data = part[:number]
            if part.dtype != view.dtype:
                data = data.clone(memory_format=torch.contiguous_format)
                data = data.view(-1).view(view.dtype).view(number, *view.shape[1:])
            view.index_copy_(0, units, data)


class HostLink(GatheredRecords):
    """Transfers between units and records on a CPU, by two threads, one for each direction.

    Args:
        blocks, rows, num_slots, slot_bytes, most_blocks: see ``GatheredRecords``.
    """

    def __init__(
        self,
        blocks: Sequence[Units],
        rows: Sequence[Units],
        num_slots: int,
        slot_bytes: int,
        most_blocks: int = 1,
    ) -> None:
        super().__init__(blocks, rows, num_slots, slot_bytes, most_blocks)
        self._up, self._down = (ThreadPoolExecutor(1, f"hpu-duo-{name}") for name in ("kv-store", "kv-load"))
        self._flying: dict[tuple[Transfer, bool], Future[Moved]] = {}

    def begin(self, transfers: Transfers) -> None:
        """Begin the transfers of a step."""
        self._begin_disk(transfers)
        for is_row in (False, True):
            for is_load, each in ((False, transfers.stores), (True, transfers.loads)):
                if not (batch := tuple(transfer for transfer in each if transfer.is_row is is_row)):
                    continue
                pool, move = (self._down, self._load) if is_load else (self._up, self._store)
                future = pool.submit(timed, move, batch)
                for transfer in batch:
                    self._flying[transfer, is_load] = future

    def poll(self) -> list[Landed]:
        """Return the transfers that have ended.

        Raises:
            Exception: of a transfer.
        """
        landed = list[Landed]()
        for (transfer, is_load), future in list(self._flying.items()):
            if future.done():
                del self._flying[transfer, is_load]
                seconds, damaged = future.result()
                landed.append(Landed(transfer, is_load, seconds, transfer in damaged))
        return landed

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Wait until transfers have ended, and forget them.

        Raises:
            DamagedRecord: a record does not have its checksum.
            Exception: of a transfer.
        """
        for key in list(self._flying):
            if key[0] in transfers:
                check_sound((key[0],), self._flying.pop(key).result().damaged)

    def wait_any(self, others: Sequence[Future[Any]] = ()) -> None:
        """Wait until one more has ended, or another thread's work."""
        wait({*self._flying.values(), *others}, return_when=FIRST_COMPLETED)

    def drain(self) -> None:
        """Wait for all, and forget them."""
        wait(set(self._flying.values()))
        self._flying.clear()

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def _batches(
        self, batch: Sequence[Transfer], *, is_load: bool
    ) -> Iterator[tuple[Sequence[Transfer], StagedRecords, torch.Tensor]]:
        """Yield transfers that fit into the buffer of a direction, and their units, int64 ``[n]``."""
        # Heads that need these units may be on other ranks.
        if (staged := self._staged.get((is_load, batch[0].is_row))) is not None:
            for begin in range(0, len(batch), len(staged.records)):
                some = batch[begin : begin + len(staged.records)]
                yield some, staged, torch.tensor([each.unit for each in some])

    @torch.inference_mode()
    def _store(self, batch: Sequence[Transfer]) -> frozenset[Transfer]:
        for some, staged, units in self._batches(batch, is_load=False):
            self._gather(staged, units, is_row=batch[0].is_row)
            self._to_slots(some, staged.records.numpy())
        return frozenset()

    @torch.inference_mode()
    def _load(self, batch: Sequence[Transfer]) -> frozenset[Transfer]:
        damaged = frozenset[Transfer]()
        for some, staged, units in self._batches(batch, is_load=True):
            damaged |= self._damaged(some, self._from_slots(some, staged.records.numpy()))
            self._spread(staged, units, is_row=batch[0].is_row)
        return damaged


class Moved(NamedTuple):
    """A batch that was copied to or from slots: seconds for each transfer, and loads of damaged records."""

    seconds: float
    damaged: frozenset[Transfer]


def timed(move: Callable[[Sequence[Transfer]], frozenset[Transfer]], batch: Sequence[Transfer]) -> Moved:
    """Run a move, which returns loads of damaged records."""
    began = time.perf_counter()
    damaged = move(batch)
    return Moved((time.perf_counter() - began) / len(batch), damaged)


def check_sound(transfers: Sequence[Transfer], damaged: frozenset[Transfer]) -> None:
    """Raise DamagedRecord if one of these transfers has loaded a damaged record."""
    if not damaged.isdisjoint(transfers):
        raise DamagedRecord("a record in host memory does not have its checksum")


RECORD_ORDER = "widest numbers first"
"""Order of the tensors in a record, a part of the fingerprint of records on a disk."""


def _by_dtype(units: Units) -> tuple[int, str]:
    return -units.tensor.dtype.itemsize, str(units.tensor.dtype)


def _view(units: Units) -> torch.Tensor:
    """Units of a store, ``[X, ...]``; numbers of one byte as bytes, which every operator moves."""
    view = units.tensor if units.layout is None else units.layout.view(units.tensor)
    return view.view(torch.uint8) if view.element_size() == 1 else view


def _bytes_of(units: Units) -> int:
    return math.prod(units.shape) * units.tensor.dtype.itemsize


def _unit_bytes(view: torch.Tensor) -> int:
    return math.prod(view.shape[1:]) * view.element_size()
