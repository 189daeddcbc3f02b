"""Queues of copies between a device and the memory of its host, which run beside its computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

import torch


class Mark(Protocol):
    """A place in a queue of work on a device."""

    @property
    def is_passed(self) -> bool:
        """Whether everything before it has ended; waits for nothing."""
        ...

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds of the device since it passed another mark of the queue; both are passed."""
        ...

    def hold_computation(self) -> None:
        """Let what is launched from now on wait for this mark, on the device."""
        ...

    def wait(self) -> None:
        """Wait on the host until it is passed."""
        ...


class CopyQueue(Protocol):
    """A queue of copies."""

    def after_launched(self) -> AbstractContextManager[None]:
        """Context in which copies are queued here, behind what the computation has launched so far."""
        ...

    def mark(self) -> Mark:
        """Put a mark behind what is queued; to be called in the context."""
        ...


class CopyStream(CopyQueue, Protocol):
    """A queue of copies and other operators."""

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Copy a few numbers from the host to the device; to be called in the context."""
        ...

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """Copy to pinned memory of the host, to be read behind a later mark; to be called in the context."""
        ...


@runtime_checkable
class CopiesAside(Protocol):
    """A runtime of a device that copies while it computes."""

    def copy_stream(self) -> CopyStream:
        """Return a new queue of copies."""
        ...

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Pin memory of the host where it lies, so that the device reads it; returns what undoes that.

        Raises:
            MemoryError: the system refuses.
        """
        ...


@runtime_checkable
class CopiesStaged(Protocol):
    """A runtime of a device that copies to and from pinned buffers of its own while it computes."""

    def copy_stream(self) -> CopyQueue:
        """Return a new queue of copies."""
        ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return new memory of the host that the device reads, uint8 ``[num_bytes]``."""
        ...


class CudaMark:
    """A CUDA event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @property
    def is_passed(self) -> bool:
        """Whether the event has been recorded."""
        return self._event.query()

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds between two events."""
        assert isinstance(earlier, CudaMark), "marks of one device"
        return earlier._event.elapsed_time(self._event) / 1e3

    def hold_computation(self) -> None:
        """Let the current stream wait for the event."""
        self._event.wait()

    def wait(self) -> None:
        """Wait for the event."""
        self._event.synchronize()


class CudaCopyStream:
    """A CUDA stream.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def after_launched(self) -> Iterator[None]:
        """Make the stream current, once it waits for the one that is current now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Copy by way of pinned memory, which torch keeps until the copy has ended."""
        return values.pin_memory().to(self._stream.device, non_blocking=True)

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """Copy to pinned memory, which torch gives to nobody else until the copy has ended."""
        on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return on_host.copy_(values, non_blocking=True)

    def mark(self) -> CudaMark:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return CudaMark(event)


def pin_for_cuda(memory: torch.Tensor) -> Callable[[], None]:
    """Register memory of the host with CUDA; see ``CopiesAside.pin``.

    Torch's own allocator of pinned memory would take up to twice as much.
    """
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error:
        raise MemoryError(
            f"expected {memory.nbytes:,} bytes of host memory that CUDA can pin, got its error {error}"
        )

    def unpin() -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    return unpin
