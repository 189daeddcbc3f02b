"""Ways between a device and the memory of its host for blocks, queries and partial results."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch

from hpu_duo.device.runtime import DeviceRuntime
from hpu_duo.device.streams import CopiesAside, Mark
from hpu_duo.engine.on_host.worker import Worker

T = TypeVar("T")


class Run(NamedTuple):
    """Neighbouring blocks that are copied to neighbouring ones: the first of each, and their number."""

    source: int
    target: int
    length: int


def runs_of(source: Sequence[int], target: Sequence[int]) -> list[Run]:
    """Return the fewest copies that bring each block of ``source`` to that of ``target``."""
    runs: list[Run] = []
    for one, other in zip(source, target, strict=True):
        if runs:
            first, to, length = runs[-1]
            if (one, other) == (first + length, to + length):
                runs[-1] = Run(first, to, length + 1)
                continue
        runs.append(Run(one, other, 1))
    return runs


def copy_runs(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor], runs: Sequence[Run]) -> None:
    """Copy blocks of each tensor ``[X, ...]`` to those of another; on streams, where one is current."""
    for one, other in zip(source, target):
        for begin, to, length in runs:
            other[to : to + length].copy_(one[begin : begin + length], non_blocking=True)


class Crossing(Protocol):
    """A way for tensors to the host and back, on which only the host's thread waits."""

    def pin(self, memory: torch.Tensor) -> None:
        """Let the device read memory of the host, for the life of this object.

        Raises:
            MemoryError: the system refuses.
        """
        ...

    def leave(self, copy: Callable[[], None]) -> None:
        """Copy blocks to the host, before any later work of the device."""
        ...

    def has_left(self) -> None:
        """Wait on the host until all blocks are there."""
        ...

    def fetch(self, select: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Begin to bring a tensor of the device to the host; returns a function that waits for it there."""
        ...

    def bring(self, values: torch.Tensor) -> torch.Tensor:
        """Bring a small tensor of the host to the device; later work of the device waits for it."""
        ...

    def begin_tile(self, worker: Worker, copy: Callable[[], T]) -> Callable[[], T]:
        """Begin to copy blocks to the device, behind the work launched so far.

        Returns:
            a function that lets the device, or the caller, wait for the copies, and returns their result.
        """
        ...

    def settle(self) -> None:
        """Wait on the host for all work, so that a clock shows how long it took."""
        ...


class SameMemory:
    """Host and device are one CPU, whose operators have ended when they return."""

    def pin(self, memory: torch.Tensor) -> None:
        """Do nothing: it is read as it is."""

    def leave(self, copy: Callable[[], None]) -> None:
        """Copy now."""
        copy()

    def has_left(self) -> None:
        """Do nothing: copies have ended."""

    def fetch(self, select: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Select in the thread that waits."""
        return select

    def bring(self, values: torch.Tensor) -> torch.Tensor:
        """Return the same tensor."""
        return values

    def begin_tile(self, worker: Worker, copy: Callable[[], T]) -> Callable[[], T]:
        """Copy in the worker's thread, beside attention to another tile."""
        return worker.begin(copy)

    def settle(self) -> None:
        """Do nothing."""


class StreamsRuntime(DeviceRuntime, CopiesAside, Protocol):
    """A runtime of a device that copies while it computes."""


class Streams:
    """Two streams of a device, one for each direction, and pinned memory of its host.

    Every copy begins behind the work launched before it, so buffers that are read by then may be
    written. Memory that operators allocate on a stream is used again behind a later such point only.

    Args:
        runtime: of the device.
    """

    def __init__(self, runtime: StreamsRuntime) -> None:
        self._runtime = runtime
        self._to_host, self._to_device = runtime.copy_stream(), runtime.copy_stream()
        self._left: Mark | None = None

    def pin(self, memory: torch.Tensor) -> None:
        """See ``Crossing``."""
        weakref.finalize(self, self._runtime.pin(memory))

    def leave(self, copy: Callable[[], None]) -> None:
        """See ``Crossing``; the step may write to these blocks, so the device waits."""
        with self._to_host.after_launched():
            copy()
            self._left = self._to_host.mark()
        self._left.hold_computation()

    def has_left(self) -> None:
        """See ``Crossing``."""
        if self._left is not None:
            self._left.wait()

    def fetch(self, select: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """See ``Crossing``; what ``select`` reads must exist until the wait has returned."""
        with self._to_host.after_launched():
            values = self._to_host.fetch(select())
            mark = self._to_host.mark()

        def arrived() -> torch.Tensor:
            mark.wait()
            return values

        return arrived

    def bring(self, values: torch.Tensor) -> torch.Tensor:
        """See ``Crossing``."""
        with self._to_device.after_launched():
            on_device = self._to_device.send(values)
            mark = self._to_device.mark()
        mark.hold_computation()
        return on_device

    def begin_tile(self, worker: Worker, copy: Callable[[], T]) -> Callable[[], T]:
        """See ``Crossing``; nothing waits on the host, so the next tiles are queued at once."""
        with self._to_device.after_launched():
            copied = copy()
            mark = self._to_device.mark()

        def arrived() -> T:
            mark.hold_computation()
            return copied

        return arrived

    def settle(self) -> None:
        """Synchronise the device."""
        self._runtime.synchronize()


def crossing_of(runtime: DeviceRuntime) -> Crossing:
    """Return the way between a device and its host.

    Args:
        runtime: of a CPU, or of a device that copies while it computes.
    """
    return Streams(runtime) if isinstance(runtime, CopiesAside) else SameMemory()
