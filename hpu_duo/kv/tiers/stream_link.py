"""Records in pinned host memory, and the streams of a device that move them."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hpu_duo.device.streams import CopiesAside, Mark
from hpu_duo.kv.row_state import Units
from hpu_duo.kv.tiers.host_link import HostRecords
from hpu_duo.kv.tiers.link import Landed, Transfer, Transfers

STAGING_BYTES = 128 << 20
"""Most bytes that are gathered, or spread, by one set of operators; a record may have more."""
_ALIGNMENT = 64
_POLL_S = 5e-5
"""Seconds between looks at marks where a thread has nothing else to do."""


@dataclass(frozen=True)
class _Flight:
    """Transfers on their way: marks before and behind them, their number, and the error that stopped them."""

    began: Mark
    ended: Mark
    number: int
    error: Exception | None


class _Buffers(NamedTuple):
    """A buffer on the device as records, ``[n, bytes]``, and as units of each store, ``[n, ...]``."""

    records: torch.Tensor
    parts: tuple[torch.Tensor, ...]


def staging_bytes(largest: int, most_units: int) -> int:
    """Return the bytes of the buffers of both directions.

    Args:
        largest: bytes of the largest record.
        most_units: most units that move in one step and direction.
    """
    return 2 * -(-max(largest, min(STAGING_BYTES, most_units * largest)) // _ALIGNMENT) * _ALIGNMENT


class StreamLink(HostRecords):
    """Transfers by two streams of a device, one for each direction; the host only queues them.

    Units are gathered to a buffer on the device, which is copied to the records, one copy each; and the other
    way round. A stream waits for what the computation has launched when its transfers begin, and the
    computation waits for no stream: it reads and writes reserved units when their transfers have landed.

    Args:
        blocks, rows, num_slots, slot_bytes: see ``HostRecords``.
        runtime: of the device.
        most_units: most units that move in one step and direction.

    Raises:
        MemoryError: the system has no such memory, or does not pin it.
    """

    def __init__(
        self,
        blocks: Sequence[Units],
        rows: Sequence[Units],
        num_slots: int,
        slot_bytes: int,
        runtime: CopiesAside,
        most_units: int = 1,
    ) -> None:
        super().__init__(blocks, rows, num_slots, slot_bytes)
        self._host = torch.from_numpy(self.slots)
        weakref.finalize(self, runtime.pin(self._host))
        # A launch is a large part of what the host does for one tensor, so views are made once.
        self._stores = {is_row: list(map(_view, tensors)) for is_row, tensors in self._tensors.items()}
        self._record_bytes = {is_row: sum(map(_unit_bytes, views)) for is_row, views in self._stores.items()}
        largest = max(self._record_bytes.values())
        # One for each direction.
        self._staging = torch.empty(
            (2, staging_bytes(largest, most_units) // 2), dtype=torch.uint8, device=self._device
        )
        self._staged = {
            (is_load, is_row): self._stages(is_load=is_load, is_row=is_row)
            for is_load in (False, True)
            for is_row, views in self._stores.items()
            if views
        }
        self._streams = runtime.copy_stream(), runtime.copy_stream()
        self._flying: dict[tuple[Transfer, bool], _Flight] = {}

    def begin(self, transfers: Transfers) -> None:
        """Queue the transfers of a step."""
        self._begin_disk(transfers)
        for is_load, each in ((False, transfers.stores), (True, transfers.loads)):
            if not each:
                continue
            stream = self._streams[is_load]
            with stream.after_launched(), torch.inference_mode():
                began = stream.mark()
                for batch in self._batches(each):
                    error: Exception | None = None
                    try:
                        (self._load if is_load else self._store)(batch)
                    except Exception as problem:  # a step goes on: whoever polls learns of it
                        error = problem
                    ended = stream.mark()
                    for transfer in batch:
                        self._flying[transfer, is_load] = _Flight(began, ended, len(batch), error)
                    began = ended

    def _stages(self, *, is_load: bool, is_row: bool) -> _Buffers:
        width = self._record_bytes[is_row]
        number = self._staging.shape[1] // width
        records = self._staging[int(is_load), : number * width].view(number, width)
        parts, start = [], 0
        for view in self._stores[is_row]:
            size, item = _unit_bytes(view), view.element_size()
            # Bytes where numbers of the store would not be aligned.
            part = records[:, start : start + size]
            if not start % item and not width % item:
                part = part.view(view.dtype).unflatten(1, view.shape[1:])
            parts.append(part)
            start += size
        return _Buffers(records, tuple(parts))

    def _batches(self, transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
        """Transfers of one kind that fit into a buffer; those of units on other ranks are alone."""
        for is_row in (False, True):
            kind = [each for each in transfers if each.is_row is is_row]
            staged = self._staged.get((False, is_row))
            size = 1 if staged is None else len(staged.records)
            yield from (kind[begin : begin + size] for begin in range(0, len(kind), size))

    def _store(self, batch: Sequence[Transfer]) -> None:
        if (staged := self._staged.get((False, batch[0].is_row))) is None:
            return
        units, number = self._streams[False].send(_ids(batch)), len(batch)
        for view, part in zip(self._stores[batch[0].is_row], staged.parts):
            if part.dtype == view.dtype:
                torch.index_select(view, 0, units, out=part[:number])
            else:
                part[:number].copy_(view.index_select(0, units).view(number, -1).view(torch.uint8))
        for record, transfer in zip(staged.records[: len(batch)], batch):
            for slot, part in zip(transfer.slots, record.split(self.slots.shape[1])):
                self._host[slot, : len(part)].copy_(part, non_blocking=True)

    def _load(self, batch: Sequence[Transfer]) -> None:
        if (staged := self._staged.get((True, batch[0].is_row))) is None:
            return
        for record, transfer in zip(staged.records[: len(batch)], batch):
            for slot, part in zip(transfer.slots, record.split(self.slots.shape[1])):
                part.copy_(self._host[slot, : len(part)], non_blocking=True)
        units, number = self._streams[True].send(_ids(batch)).long(), len(batch)
        for view, part in zip(self._stores[batch[0].is_row], staged.parts):
            data = part[:number]
            if part.dtype != view.dtype:
                data = data.clone(memory_format=torch.contiguous_format)
                data = data.view(-1).view(view.dtype).view(number, *view.shape[1:])
            view.index_copy_(0, units, data)

    def poll(self) -> list[Landed]:
        """Return the transfers that have ended.

        Raises:
            Exception: of a transfer.
        """
        ended = [(key, flight) for key, flight in self._flying.items() if flight.ended.is_passed]
        for key, flight in ended:
            del self._flying[key]
            if flight.error is not None:
                raise flight.error
        return [
            Landed(transfer, is_load, flight.ended.seconds_since(flight.began) / flight.number)
            for (transfer, is_load), flight in ended
        ]

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Let the computation wait until transfers have ended, and forget them.

        Raises:
            Exception: of a transfer.
        """
        for key in [key for key in self._flying if key[0] in transfers]:
            flight = self._flying.pop(key)
            if flight.error is not None:
                raise flight.error
            flight.ended.hold_computation()

    def wait_any(self, others: Sequence[Future[Any]] = ()) -> None:
        """Wait until one more has ended, or another thread's work."""
        while self._flying or others:
            flights = self._flying.values()
            if any(each.ended.is_passed for each in flights) or any(each.done() for each in others):
                return
            time.sleep(_POLL_S)

    def drain(self) -> None:
        """Wait for all, and forget them."""
        for flight in self._flying.values():
            flight.ended.wait()
        self._flying.clear()

    def warm_up(self) -> None:
        """Nothing is compiled."""


def _view(units: Units) -> torch.Tensor:
    """Units of a store, ``[X, ...]``."""
    return units.tensor if units.layout is None else units.layout.view(units.tensor)


def _unit_bytes(view: torch.Tensor) -> int:
    return math.prod(view.shape[1:]) * view.element_size()


def _ids(batch: Sequence[Transfer]) -> torch.Tensor:
    """Ids of units, int32 ``[n]``."""
    return torch.tensor([each.unit for each in batch], dtype=torch.int32)
