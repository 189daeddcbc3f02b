"""A thread that attends on the host, or copies from it, while the device computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch

from hpu_duo.not_picklable import NotPicklable

T = TypeVar("T")
_SLEEP_S = 5e-4
"""Shortest wait for which a thread sleeps; shorter ones would be rounded up by the system."""


class Worker(Protocol):
    """Runs work of the host beside the device; says what crosses the link and what is read by whom."""

    def begin(self, work: Callable[[], T]) -> Callable[[], T]:
        """Queue work; returns a function that waits for its result and raises its exceptions."""
        ...

    def move(self, num_bytes: int, copy: Callable[[], T]) -> T:
        """Copy something that crosses the link; called by work only."""
        ...

    def host_reads(self, num_bytes: int) -> None:
        """Work has attended to keys and values of so many bytes on the host."""
        ...

    def device_reads(self, num_bytes: int) -> None:
        """The device has attended to so many bytes that were moved."""
        ...

    def drain(self) -> None:
        """Wait for all work, whose results nobody wants any more."""
        ...


class WorkerThread(NotPicklable):
    """Works in one thread.

    Args:
        bytes_per_s: of a link to simulate, either way; None = as fast as memory is copied.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._bytes_per_s = bytes_per_s
        self._thread = ThreadPoolExecutor(1, "hpu-duo-host-attention")
        self._last: Future[Any] | None = None

    def begin(self, work: Callable[[], T]) -> Callable[[], T]:
        """See ``Worker``; what the work raises is raised by the wait."""
        future = self._thread.submit(_in_inference_mode, work)
        self._last = future
        return future.result

    def move(self, num_bytes: int, copy: Callable[[], T]) -> T:
        """Copy, for as long as the link takes."""
        began = time.perf_counter()
        copied = copy()
        if self._bytes_per_s is not None:
            end = began + num_bytes / self._bytes_per_s
            if (rest := end - time.perf_counter()) > _SLEEP_S:
                time.sleep(rest - _SLEEP_S)
            while time.perf_counter() < end:
                pass
        return copied

    def host_reads(self, num_bytes: int) -> None:
        """Do nothing: this time has really passed."""

    def device_reads(self, num_bytes: int) -> None:
        """Do nothing: this time has really passed."""

    def drain(self) -> None:
        """Wait for the last work, which runs behind all others."""
        if self._last is not None:
            self._last.exception()
            self._last = None


class TimedWorker:
    """Times the parts of what another worker does.

    Args:
        clock: seconds, in any thread.
        settle: waits for a device that runs behind, after each part of the work; None for a device that does
            not.

    Attributes:
        link, host, device: bytes that were copied, and that host and device attended to, and seconds of each.
    """

    def __init__(
        self,
        worker: Worker,
        clock: Callable[[], float] = time.perf_counter,
        settle: Callable[[], None] | None = None,
    ) -> None:
        self._worker, self._clock, self._settle = worker, clock, settle
        self.link, self.host, self.device = (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)
        self._moved_at = self._device_at = 0.0

    def begin(self, work: Callable[[], T]) -> Callable[[], T]:
        """See ``Worker``; the device attends from here on, or from the end of a wait."""
        join = self._worker.begin(work)
        self._device_at = self._clock()

        def joined() -> T:
            result = join()
            self._device_at = self._clock()
            return result

        return joined

    def move(self, num_bytes: int, copy: Callable[[], T]) -> T:
        """Copy, and time it; the host attends from here on."""
        began = self._clock()
        result = self._worker.move(num_bytes, copy)
        if self._settle is not None:
            self._settle()
        self._moved_at = self._clock()
        if self._settle is not None:
            self._device_at = self._moved_at  # nothing ran beside the copy
        self.link = self.link[0] + num_bytes, self.link[1] + self._moved_at - began
        return result

    def host_reads(self, num_bytes: int) -> None:
        """See ``Worker``."""
        self._worker.host_reads(num_bytes)
        self.host = self.host[0] + num_bytes, self.host[1] + self._clock() - self._moved_at

    def device_reads(self, num_bytes: int) -> None:
        """See ``Worker``."""
        self._worker.device_reads(num_bytes)
        if self._settle is not None:
            self._settle()
        began, self._device_at = self._device_at, self._clock()
        self.device = self.device[0] + num_bytes, self.device[1] + self._device_at - began

    def drain(self) -> None:
        """See ``Worker``."""
        self._worker.drain()


def _in_inference_mode(work: Callable[[], T]) -> T:
    with torch.inference_mode():
        return work()
