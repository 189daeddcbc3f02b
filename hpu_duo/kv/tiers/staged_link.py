"""Records in host memory, and captured graphs and streams of an HPU that move them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from graphs import BatchShape, CaptureBackend
from hpu_duo.device.streams import CopiesStaged, CopyQueue, Mark
from hpu_duo.kv.row_state import Units
from hpu_duo.kv.tiers.host_link import STAGING_BYTES, HostRecords, Moved, check_sound, timed
from hpu_duo.kv.tiers.link import Landed, Transfer, Transfers
from hpu_duo.kv.tiers.records import Bytes
from kernels_ref import UnitLayout
from kernels_ref.units import unit_places, write

_NUM_BUFFERS = 2
"""Buffers of each direction and kind of units: one is copied while the other one is filled."""
_ID_BYTES = 4
_IDS = "ids"
_POLL_S = 5e-5
"""Seconds between looks at marks where the engine has nothing else to do."""

Groups: TypeAlias = tuple[tuple[Units, ...], ...]
"""Tensors of stores by dtype, in the order of a record."""


class StagedSizes(NamedTuple):
    """Sizes of the buffers of a ``StagedLink``.

    Attributes:
        num_blocks, num_rows: units that move together, 0 of a kind that this rank does not have.
        buffer_bytes: of all buffers on the device, and as many of pinned memory on the host.
        working_bytes: of the units that a graph gathers before they are in a buffer.
    """

    num_blocks: int
    num_rows: int
    buffer_bytes: int
    working_bytes: int

    @classmethod
    def of(cls, block_bytes: int, row_bytes: int, most_blocks: int) -> StagedSizes:
        """Return the sizes: as many blocks as a step moves and a buffer holds, and one row.

        Args:
            block_bytes, row_bytes: of a record, 0 of a kind that this rank does not have.
            most_blocks: most blocks that move in one step and direction.
        """
        held = STAGING_BYTES // _NUM_BUFFERS // max(1, block_bytes)
        num_blocks, num_rows = max(1, min(most_blocks, held)) if block_bytes else 0, int(row_bytes > 0)
        one = num_blocks * (block_bytes + _ID_BYTES) + num_rows * (row_bytes + _ID_BYTES)
        working = max(num_blocks * block_bytes, num_rows * row_bytes)
        return cls(num_blocks, num_rows, 2 * _NUM_BUFFERS * one, working)


class _Buffer(NamedTuple):
    """Ids of units and their records by dtype, on the device and in pinned memory, and the graph of both.

    Attributes:
        ids, host_ids: int32 ``[T]``.
        data, host_data: ``[T, n]`` for each dtype.
        host_bytes: the same as bytes.
        run: gathers the units to ``data``, or spreads it to them.
    """

    ids: torch.Tensor
    host_ids: torch.Tensor
    data: tuple[torch.Tensor, ...]
    host_data: tuple[torch.Tensor, ...]
    host_bytes: tuple[Bytes, ...]
    run: Callable[[], None]

    def send_ids(self) -> None:
        """Copy the ids to the device."""
        self.ids.copy_(self.host_ids, non_blocking=True)


@dataclass
class _Flight:
    """Transfers in a buffer.

    Attributes:
        seconds: of its part that has ended, for each transfer.
        moved: end of the copies between pinned memory and records; None before they begin.
        marks: before and behind the copies between device and pinned memory; None before they begin.
        forgotten: transfers that ``poll`` does not return.
        is_spread: whether the graph of a load has been launched.
        damaged: loads of records that do not have their checksum.
    """

    batch: tuple[Transfer, ...]
    buffer: _Buffer
    seconds: float = 0.0
    moved: Future[Moved] | None = None
    marks: tuple[Mark, Mark] | None = None
    forgotten: set[Transfer] = field(default_factory=set)
    is_spread: bool = False
    damaged: frozenset[Transfer] = frozenset()

    def block(self) -> None:
        """Wait for what has begun."""
        if self.moved is not None and not self.moved.done():
            wait([self.moved])
        elif self.marks is not None:
            self.marks[1].wait()


class _Lane:
    """One direction of one kind of units: its buffers, what is in them, and what waits for one."""

    def __init__(self, buffers: Sequence[_Buffer], null_unit: int) -> None:
        self.buffers, self.null_unit = tuple(buffers), null_unit
        self.size = len(self.buffers[0].ids)
        self.reset()

    def reset(self) -> None:
        """Forget all transfers."""
        self.free = list(self.buffers)
        self.flying: list[_Flight] = []
        self.waiting: deque[Transfer] = deque()

    def take(self) -> _Flight:
        """Begin a flight with the next transfers, whose units are in the ids, behind them the null unit."""
        batch = tuple(self.waiting.popleft() for _ in range(min(self.size, len(self.waiting))))
        flight = _Flight(batch, self.free.pop(0))
        self.flying.append(flight)
        units = [each.unit for each in batch] + [self.null_unit] * (self.size - len(batch))
        flight.buffer.host_ids.copy_(torch.tensor(units, dtype=torch.int32))
        return flight


class StagedLink(HostRecords):
    """Transfers by captured graphs, pinned buffers and two streams of a device, one for each direction.

    A graph gathers units to a buffer on the device, behind the copies of the step that fill them. The buffer
    is copied to pinned memory on a stream, and from there to the records by a thread. The other direction is
    the reverse. ``begin`` and ``poll`` look at marks and threads, and begin what comes next; they wait for
    nothing. Every graph and copy has the same shape, padded with the null unit. A transfer that fails ends no
    step of rank 0, where ``poll`` raises its error; elsewhere the step that waits for it fails.

    Args:
        blocks, rows, num_slots, slot_bytes: see ``HostRecords``.
        runtime: of the device.
        most_blocks: most blocks that move in one step and direction.
        backend: captures the graphs.
        shape: bucket that they are named after.

    Attributes:
        sizes: of the buffers.
    """

    def __init__(
        self,
        blocks: Sequence[Units],
        rows: Sequence[Units],
        num_slots: int,
        slot_bytes: int,
        runtime: CopiesStaged,
        most_blocks: int,
        backend: CaptureBackend,
        shape: BatchShape,
    ) -> None:
        super().__init__(blocks, rows, num_slots, slot_bytes)
        self._backend, self._shape, self._pinned = backend, shape, runtime.pinned
        groups = {is_row: _groups(tensors) for is_row, tensors in self._tensors.items()}
        record_bytes = {is_row: sum(map(_record_bytes, found)) for is_row, found in groups.items()}
        self.sizes = StagedSizes.of(record_bytes[False], record_bytes[True], most_blocks)
        self._lanes: dict[tuple[bool, bool], _Lane] = {}
        for is_row, found in groups.items():
            for is_load in (False, True) if found else ():
                size = self.sizes.num_rows if is_row else self.sizes.num_blocks
                buffers = [
                    self._buffer(found, size, is_load=is_load, is_row=is_row) for _ in range(_NUM_BUFFERS)
                ]
                self._lanes[is_load, is_row] = _Lane(buffers, found[0][0].null_unit)
        self._streams: tuple[CopyQueue, CopyQueue] = runtime.copy_stream(), runtime.copy_stream()
        self._threads = [ThreadPoolExecutor(1, f"hpu-duo-{name}") for name in ("kv-store", "kv-load")]
        self._landed: list[Landed] = []
        self._failed: dict[tuple[Transfer, bool], Exception] = {}
        self._has_begun = False

    def _buffer(self, groups: Groups, size: int, *, is_load: bool, is_row: bool) -> _Buffer:
        ids = torch.zeros(size, dtype=torch.int32, device=self._device)
        host_ids = self._pinned(ids.nbytes).view(torch.int32)
        dtypes = [(_record_bytes(group), group[0].tensor.dtype) for group in groups]
        host = [self._pinned(size * num).view(dtype).view(size, -1) for num, dtype in dtypes]
        data = tuple(torch.zeros(each.shape, dtype=each.dtype, device=self._device) for each in host)
        inputs = {_IDS: ids, **{str(number): each for number, each in enumerate(data)}}
        key = ("transfers", is_load, is_row)
        region = self._backend.region(self._shape, key, spread_units if is_load else gather_units)

        def move(found: Mapping[str, torch.Tensor]) -> None:
            region(found[_IDS], tuple(found[str(number)] for number in range(len(groups))), groups)

        captured = self._backend.capture(move, self._shape)
        as_bytes = tuple(each.view(torch.uint8).numpy() for each in host)
        return _Buffer(ids, host_ids, data, tuple(host), as_bytes, lambda: captured(inputs))

    @torch.inference_mode()
    def begin(self, transfers: Transfers) -> None:
        """Begin the transfers of a step.

        Raises:
            Exception: of a transfer that ``wait`` has forgotten.
        """
        self._finish_stores(transfers)
        self._begin_disk(transfers)
        self._has_begun = True
        for is_load, each in ((False, transfers.stores), (True, transfers.loads)):
            for transfer in each:
                self._failed.pop((transfer, is_load), None)  # an earlier one that rank 0 has dropped
                if (lane := self._lanes.get((is_load, transfer.is_row))) is not None:
                    lane.waiting.append(transfer)
                else:  # heads that need it are on other ranks
                    self._landed.append(Landed(transfer, is_load, 0.0))
        self._go_on()

    def poll(self) -> list[Landed]:
        """Return the transfers that have ended.

        Raises:
            Exception: of a transfer.
        """
        self._go_on()
        if self._failed:
            error = next(iter(self._failed.values()))
            self._failed.clear()
            raise error
        landed, self._landed = self._landed, []
        return landed

    @torch.inference_mode()
    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Let the computation wait until transfers have ended, and forget them.

        The host waits for a thread, or where a rank is behind by all of its buffers. What leaves has been
        gathered as it began, so nothing waits for that.

        Raises:
            Exception: of one of them, or of one that has been forgotten.
        """
        self._go_on()
        for (is_load, _), lane in self._lanes.items() if transfers else ():
            while any(each in transfers for each in lane.waiting):
                lane.flying[0].block()
                self._go_on()
            for flight in list(lane.flying):
                known = [each for each in flight.batch if each in transfers]
                if is_load and known and not flight.is_spread:
                    try:
                        self._hold_for(flight)
                    except Exception as error:
                        self._end(lane, flight, error, is_load=True)
                flight.forgotten.update(known)
        damaged = frozenset(each.transfer for each in self._landed if each.is_damaged)
        self._landed = [each for each in self._landed if each.transfer not in transfers]
        errors = [self._failed.pop(key) for key in list(self._failed) if key[0] in transfers]
        if errors:
            raise errors[0]
        check_sound(transfers, damaged)

    def _hold_for(self, flight: _Flight) -> None:
        """Let the computation wait for a load, whose buffer is not free before its copies have ended."""
        assert flight.moved is not None, "a thread has begun"
        flight.damaged = flight.moved.result().damaged
        check_sound(flight.batch, flight.damaged)
        if flight.marks is None:
            self._copy(flight, is_load=True)
        assert flight.marks is not None, "copies are queued"
        flight.marks[1].hold_computation()
        flight.buffer.run()
        flight.is_spread = True

    def _finish_stores(self, transfers: Transfers) -> None:
        """Wait for what has landed on rank 0 and not here, of slots that transfers need."""
        lanes = [lane for (is_load, _), lane in self._lanes.items() if not is_load]
        if not any(flight.forgotten for lane in lanes for flight in lane.flying):
            return
        needed = {slot for each in (*transfers.stores, *transfers.loads) for slot in each.slots}
        if (orders := transfers.disk) is not None:
            needed.update(slot for each in (*orders.reads, *orders.writes) for slot in each.slots)
        for lane in lanes:
            while any(
                not needed.isdisjoint(each.slots) for flight in lane.flying for each in flight.forgotten
            ):
                lane.flying[0].block()
                self._go_on()

    def wait_any(self, others: Sequence[Future[Any]] = ()) -> None:
        """Wait until one more has ended, or another thread's work."""
        while others or any(lane.flying or lane.waiting for lane in self._lanes.values()):
            self._go_on()
            if self._landed or self._failed or any(each.done() for each in others):
                return
            time.sleep(_POLL_S)

    def drain(self) -> None:
        """Wait for all that has begun, and forget everything."""
        for lane in self._lanes.values():
            for flight in lane.flying:
                for _ in range(2):  # the thread, and the stream
                    flight.block()
            lane.reset()
        self._landed.clear()
        self._failed.clear()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the graphs, from null units to null units; nothing once transfers have begun."""
        if self._has_begun:
            return
        for lane in self._lanes.values():
            for buffer in lane.buffers:
                buffer.host_ids.fill_(lane.null_unit)
                for _ in range(self._backend.num_first_runs):
                    buffer.send_ids()
                    buffer.run()

    @torch.inference_mode()
    def _go_on(self) -> None:
        """Begin what can begin, and note what has ended; waits for nothing.

        Raises:
            Exception: of a transfer that ``wait`` has forgotten.
        """
        lost: list[Exception] = []
        for (is_load, _), lane in self._lanes.items():
            for flight in list(lane.flying):
                try:
                    if self._has_landed(flight, is_load=is_load):
                        self._end(lane, flight, None, is_load=is_load)
                except Exception as error:
                    self._end(lane, flight, error, is_load=is_load)
                    if flight.forgotten:
                        lost.append(error)
            while lane.waiting and lane.free:
                flight = lane.take()
                try:
                    self._start(flight, is_load=is_load)
                except Exception as error:
                    self._end(lane, flight, error, is_load=is_load)
        if lost:
            raise lost[0]

    def _start(self, flight: _Flight, *, is_load: bool) -> None:
        if is_load:
            flight.moved = self._move(flight, is_load=True)
        else:
            flight.buffer.send_ids()
            flight.buffer.run()
            self._copy(flight, is_load=False)

    def _end(self, lane: _Lane, flight: _Flight, error: Exception | None, *, is_load: bool) -> None:
        """Free the buffer of a flight that has landed or failed, and note that of what is not forgotten."""
        lane.flying.remove(flight)
        lane.free.append(flight.buffer)
        known = [each for each in flight.batch if each not in flight.forgotten]
        if error is None:
            self._landed += (Landed(each, is_load, flight.seconds, each in flight.damaged) for each in known)
        else:
            self._failed.update(((each, is_load), error) for each in known)

    def _has_landed(self, flight: _Flight, *, is_load: bool) -> bool:
        if flight.moved is not None and flight.moved.done() and (is_load == (flight.marks is None)):
            seconds, flight.damaged = flight.moved.result()
            flight.seconds += seconds
            if not is_load:
                return True
            self._copy(flight, is_load=True)
        elif flight.marks is not None and (is_load or flight.moved is None) and flight.marks[1].is_passed:
            began, ended = flight.marks
            flight.seconds += ended.seconds_since(began) / len(flight.batch)
            if is_load:
                if not flight.is_spread:
                    flight.buffer.run()
                return True
            flight.moved = self._move(flight, is_load=False)
        return False

    def _copy(self, flight: _Flight, *, is_load: bool) -> None:
        """Queue the copies between device and pinned memory."""
        stream, buffer = self._streams[is_load], flight.buffer
        with stream.after_launched():
            began = stream.mark()
            if is_load:
                buffer.send_ids()
            for on_device, on_host in zip(buffer.data, buffer.host_data):
                target, source = (on_device, on_host) if is_load else (on_host, on_device)
                target.copy_(source, non_blocking=True)
            flight.marks = began, stream.mark()

    def _move(self, flight: _Flight, *, is_load: bool) -> Future[Moved]:
        """Let a thread copy between pinned memory and records."""

        def copy(batch: Sequence[Transfer]) -> frozenset[Transfer]:
            begin, sums = 0, np.zeros(len(batch), np.int64)
            for data in flight.buffer.host_bytes:
                if is_load:
                    sums += self._from_slots(batch, data, begin)
                else:
                    self._to_slots(batch, data, begin)
                begin += data.shape[1]
            return self._damaged(batch, sums) if is_load else frozenset()

        return self._threads[is_load].submit(timed, copy, flight.batch)


def gather_units(ids: torch.Tensor, data: tuple[torch.Tensor, ...], groups: Groups) -> None:
    """Copy units to a buffer.

    Args:
        ids: of the units, int32 ``[T]``.
        data: ``[T, n]`` for each dtype.
        groups: the tensors that the units are in.
    """
    for buffer, group in zip(data, groups):
        buffer.copy_(torch.cat([each.read(ids).reshape(len(ids), -1) for each in group], 1))


def spread_units(ids: torch.Tensor, data: tuple[torch.Tensor, ...], groups: Groups) -> None:
    """Copy a buffer to units; see ``gather_units``."""
    places: dict[UnitLayout, torch.Tensor] = {}
    for buffer, group in zip(data, groups):
        start = 0
        for each in group:
            width = math.prod(each.shape)
            part = buffer[:, start : start + width].reshape(len(ids), *each.shape)
            start += width
            if each.layout is None:
                each.write(ids, part)
                continue
            if each.layout not in places:
                places[each.layout] = unit_places(ids, each.layout)
            write(each.tensor, places[each.layout], part)


def _groups(tensors: Sequence[Units]) -> Groups:
    return tuple(tuple(group) for _, group in groupby(tensors, key=lambda each: each.tensor.dtype))


def _record_bytes(group: Sequence[Units]) -> int:
    return sum(math.prod(each.shape) * each.tensor.dtype.itemsize for each in group)
