"""Records in pinned host memory, and the streams of a device that move them."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from hpu_duo.device.streams import CopiesAside, Mark
from hpu_duo.kv.row_state import Units
from hpu_duo.kv.tiers.host_link import HostRecords
from hpu_duo.kv.tiers.link import Landed, Transfer, Transfers

STAGING_BYTES = 128 << 20
"""Most bytes that are gathered, or spread, by one set of operators; a record may have more."""
_POLL_S = 5e-5
"""Seconds between looks at marks where a thread has nothing else to do."""


@dataclass(frozen=True)
class _Flight:
    """Transfers on their way: marks before and behind them, and their number."""

    began: Mark
    ended: Mark
    number: int


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
        self._widths = {
            is_row: [math.prod(each.shape) * each.tensor.dtype.itemsize for each in tensors]
            for is_row, tensors in self._tensors.items()
        }
        largest = max(map(sum, self._widths.values()))
        size = max(largest, min(STAGING_BYTES, most_units * largest))
        # One for each direction.
        self._staging = torch.empty((2, size), dtype=torch.uint8, device=self._device)
        self._streams = runtime.copy_stream(), runtime.copy_stream()
        self._flying: dict[tuple[Transfer, bool], _Flight] = {}

    def begin(self, transfers: Transfers) -> None:
        """Queue the transfers of a step."""
        for is_load, each in ((False, transfers.stores), (True, transfers.loads)):
            if not each:
                continue
            stream = self._streams[is_load]
            with stream.after_launched(), torch.inference_mode():
                began = stream.mark()
                for batch in self._batches(each):
                    (self._load if is_load else self._store)(batch)
                    ended = stream.mark()
                    for transfer in batch:
                        self._flying[transfer, is_load] = _Flight(began, ended, len(batch))
                    began = ended

    def _batches(self, transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
        """Transfers of one kind that fit into a buffer."""
        for is_row in (False, True):
            kind = [each for each in transfers if each.is_row is is_row]
            size = max(1, self._staging.shape[1] // max(1, sum(self._widths[is_row])))
            yield from (kind[begin : begin + size] for begin in range(0, len(kind), size))

    def _store(self, batch: Sequence[Transfer]) -> None:
        staged = self._staged(batch, is_load=False)
        units, start = self._streams[False].send(_ids(batch)), 0
        for each, width in zip(self._tensors[batch[0].is_row], self._widths[batch[0].is_row]):
            data = each.read(units).view(torch.uint8)
            staged[:, start : start + width].copy_(data.view(len(batch), width))
            start += width
        for record, transfer in zip(staged, batch):
            for slot, part in zip(transfer.slots, record.split(self.slots.shape[1])):
                self._host[slot, : len(part)].copy_(part, non_blocking=True)

    def _load(self, batch: Sequence[Transfer]) -> None:
        staged = self._staged(batch, is_load=True)
        for record, transfer in zip(staged, batch):
            for slot, part in zip(transfer.slots, record.split(self.slots.shape[1])):
                part.copy_(self._host[slot, : len(part)], non_blocking=True)
        units, start = self._streams[True].send(_ids(batch)).long(), 0
        for each, width in zip(self._tensors[batch[0].is_row], self._widths[batch[0].is_row]):
            # A copy, whose address suits any dtype.
            data = staged[:, start : start + width].clone().view(each.tensor.dtype)
            view = each.tensor if each.layout is None else each.layout.view(each.tensor)
            view.index_copy_(0, units, data.view(len(batch), *each.shape))
            start += width

    def _staged(self, batch: Sequence[Transfer], *, is_load: bool) -> torch.Tensor:
        """Return a part of the buffer of a direction, ``[n, bytes of a record]``."""
        width = sum(self._widths[batch[0].is_row])
        return self._staging[int(is_load), : len(batch) * width].view(len(batch), width)

    def poll(self) -> list[Landed]:
        """Return the transfers that have ended."""
        ended = [(key, flight) for key, flight in self._flying.items() if flight.ended.is_passed]
        for key, _ in ended:
            del self._flying[key]
        return [
            Landed(transfer, is_load, flight.ended.seconds_since(flight.began) / flight.number)
            for (transfer, is_load), flight in ended
        ]

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Let the computation wait until transfers have ended, and forget them."""
        for key in [key for key in self._flying if key[0] in transfers]:
            self._flying.pop(key).ended.hold_computation()

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


def _ids(batch: Sequence[Transfer]) -> torch.Tensor:
    """Ids of units, int32 ``[n]``."""
    return torch.tensor([each.unit for each in batch], dtype=torch.int32)
