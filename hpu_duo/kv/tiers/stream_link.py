"""Records in pinned host memory, and the streams of a device that move them."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from hpu_duo.device.streams import CopiesAside, Mark
from hpu_duo.kv.row_state import Units
from hpu_duo.kv.tiers.host_link import GatheredRecords, StagedRecords, check_sound
from hpu_duo.kv.tiers.link import Landed, Transfer, Transfers

_POLL_S = 5e-5
"""Seconds between looks at marks where a thread has nothing else to do."""


@dataclass(frozen=True)
class _Flight:
    """Transfers on their way.

    Attributes:
        began, ended: marks before and behind them.
        number: of transfers.
        sums: of their records on the device, int64 ``[number]`` in pinned memory; None without any.
        error: that stopped them.
    """

    began: Mark
    ended: Mark
    number: int
    sums: torch.Tensor | None
    error: Exception | None


class StreamLink(GatheredRecords):
    """Transfers by two streams of a device, one for each direction; the host only queues them.

    Units are gathered to a buffer on the device, which is copied to the records, one copy each; and the other
    way round. A stream waits for what the computation has launched when its transfers begin, and the
    computation waits for no stream: it reads and writes reserved units when their transfers have landed.
    The device adds up checksums, as the host does not read records. A rank that is behind compares those of
    transfers that it has forgotten as soon as they end.

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
        # By transfer and direction: its place in its flight, too.
        self._flying: dict[tuple[Transfer, bool], tuple[_Flight, int]] = {}
        self._forgotten: deque[tuple[Transfer, bool, _Flight, int]] = deque()

    def begin(self, transfers: Transfers) -> None:
        """Queue the transfers of a step.

        Raises:
            DamagedRecord: a record that has been loaded for an earlier step does not have its checksum.
        """
        self._end_forgotten(waits=transfers.disk is not None)
        self._begin_disk(transfers)
        for is_load, each in ((False, transfers.stores), (True, transfers.loads)):
            if not each:
                continue
            stream = self._streams[is_load]
            with stream.after_launched(), torch.inference_mode():
                began = stream.mark()
                for batch in self._batches(each):
                    error: Exception | None = None
                    sums: torch.Tensor | None = None
                    try:
                        sums = (self._load if is_load else self._store)(batch)
                    except Exception as problem:  # a step goes on: whoever polls learns of it
                        error = problem
                    flight = _Flight(began, stream.mark(), len(batch), sums, error)
                    for place, transfer in enumerate(batch):
                        self._flying[transfer, is_load] = flight, place
                    began = flight.ended

    def _batches(self, transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
        """Transfers of one kind that fit into a buffer; those of units on other ranks are alone."""
        for is_row in (False, True):
            kind = [each for each in transfers if each.is_row is is_row]
            staged = self._staged.get((False, is_row))
            size = 1 if staged is None else len(staged.records)
            yield from (kind[begin : begin + size] for begin in range(0, len(kind), size))

    def _sums(self, batch: Sequence[Transfer], staged: StagedRecords, *, is_load: bool) -> torch.Tensor:
        """Add up the first records of a buffer."""
        word = getattr(torch, f"int{8 * self.memory.word_bytes}")
        sums = staged.records[: len(batch)].view(word).sum(1, dtype=torch.int64)
        return self._streams[is_load].fetch(sums)

    def _store(self, batch: Sequence[Transfer]) -> torch.Tensor | None:
        if (staged := self._staged.get((False, batch[0].is_row))) is None:
            return None
        self._gather(staged, self._streams[False].send(_ids(batch)), is_row=batch[0].is_row)
        for record, transfer in zip(staged.records[: len(batch)], batch):
            for slot, part in zip(transfer.slots, record.split(self.slots.shape[1])):
                self._host[slot, : len(part)].copy_(part, non_blocking=True)
        return self._sums(batch, staged, is_load=False)

    def _load(self, batch: Sequence[Transfer]) -> torch.Tensor | None:
        if (staged := self._staged.get((True, batch[0].is_row))) is None:
            return None
        for record, transfer in zip(staged.records[: len(batch)], batch):
            for slot, part in zip(transfer.slots, record.split(self.slots.shape[1])):
                part.copy_(self._host[slot, : len(part)], non_blocking=True)
        self._spread(staged, self._streams[True].send(_ids(batch)).long(), is_row=batch[0].is_row)
        return self._sums(batch, staged, is_load=True)

    def poll(self) -> list[Landed]:
        """Return the transfers that have ended.

        Raises:
            Exception: of a transfer.
        """
        ended = [(key, *found) for key, found in self._flying.items() if found[0].ended.is_passed]
        landed = list[Landed]()
        for (transfer, is_load), flight, place in ended:
            del self._flying[transfer, is_load]
            if flight.error is not None:
                raise flight.error
            seconds = flight.ended.seconds_since(flight.began) / flight.number
            is_sound = self._check(transfer, flight, place, is_load=is_load)
            landed.append(Landed(transfer, is_load, seconds, not is_sound))
        return landed

    def _check(self, transfer: Transfer, flight: _Flight, place: int, *, is_load: bool) -> bool:
        """Note the checksum of a record that has landed; whether one that was loaded has its own."""
        found, first = 0 if flight.sums is None else int(flight.sums[place]), transfer.slots[0]
        if not is_load:
            self.memory.sums[first] = found
        return bool(self.memory.sums[first] == found)

    def _end_forgotten(self, *, waits: bool) -> None:
        """Check the records of forgotten transfers that have ended, in order.

        Args:
            waits: for all of them, as the host reads or fills slots next.
        """
        while self._forgotten:
            transfer, is_load, flight, place = self._forgotten[0]
            if waits:
                flight.ended.wait()
            elif not flight.ended.is_passed:
                return
            del self._forgotten[0]
            is_sound = self._check(transfer, flight, place, is_load=is_load)
            check_sound((transfer,), frozenset() if is_sound else frozenset((transfer,)))

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Let the computation wait until transfers have ended, and forget them.

        Raises:
            Exception: of a transfer.
        """
        for key in [key for key in self._flying if key[0] in transfers]:
            flight, place = self._flying.pop(key)
            if flight.error is not None:
                raise flight.error
            flight.ended.hold_computation()
            self._forgotten.append((*key, flight, place))

    def wait_any(self, others: Sequence[Future[Any]] = ()) -> None:
        """Wait until one more has ended, or another thread's work."""
        while self._flying or others:
            flights = self._flying.values()
            if any(each.ended.is_passed for each, _ in flights) or any(each.done() for each in others):
                return
            time.sleep(_POLL_S)

    def drain(self) -> None:
        """Wait for all, and forget them."""
        for flight, _ in self._flying.values():
            flight.ended.wait()
        self._flying.clear()
        self._forgotten.clear()

    def warm_up(self) -> None:
        """Nothing is compiled."""


def _ids(batch: Sequence[Transfer]) -> torch.Tensor:
    """Ids of units, int32 ``[n]``."""
    return torch.tensor([each.unit for each in batch], dtype=torch.int32)
