"""Records in pinned host memory, and the streams of a device that move them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from hpu_duo.device.streams import CopiesAside, Mark
from hpu_duo.kv.row_state import Units
from hpu_duo.kv.tiers.host_link import GatheredRecords
from hpu_duo.kv.tiers.link import Landed, Transfer, Transfers

_POLL_S = 5e-5
"""Seconds between looks at marks where a thread has nothing else to do."""


@dataclass(frozen=True)
class _Flight:
    """Transfers on their way: marks before and behind them, their number, and the error that stopped them."""

    began: Mark
    ended: Mark
    number: int
    error: Exception | None


class StreamLink(GatheredRecords):
    """Transfers by two streams of a device, one for each direction; the host only queues them.

    Units are gathered to a buffer on the device, which is copied to the records, one copy each; and the other
    way round. A stream waits for what the computation has launched when its transfers begin, and the
    computation waits for no stream: it reads and writes reserved units when their transfers have landed.

    Args:
        blocks, rows, num_slots, slot_bytes, most_blocks: see ``GatheredRecords``.
        runtime: of the device.

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
        most_blocks: int = 1,
    ) -> None:
        super().__init__(blocks, rows, num_slots, slot_bytes, most_blocks)
        self._host = torch.from_numpy(self.slots)
        weakref.finalize(self, runtime.pin(self._host))
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
        self._gather(staged, self._streams[False].send(_ids(batch)), is_row=batch[0].is_row)
        for record, transfer in zip(staged.records[: len(batch)], batch):
            for slot, part in zip(transfer.slots, record.split(self.slots.shape[1])):
                self._host[slot, : len(part)].copy_(part, non_blocking=True)

    def _load(self, batch: Sequence[Transfer]) -> None:
        if (staged := self._staged.get((True, batch[0].is_row))) is None:
            return
        for record, transfer in zip(staged.records[: len(batch)], batch):
            for slot, part in zip(transfer.slots, record.split(self.slots.shape[1])):
                part.copy_(self._host[slot, : len(part)], non_blocking=True)
        self._spread(staged, self._streams[True].send(_ids(batch)).long(), is_row=batch[0].is_row)

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


def _ids(batch: Sequence[Transfer]) -> torch.Tensor:
    """Ids of units, int32 ``[n]``."""
    return torch.tensor([each.unit for each in batch], dtype=torch.int32)
