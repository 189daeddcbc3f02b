"""Stand-in of ``habana_frameworks.torch.hpu``; as there, graphs exist in lazy mode only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from habana_frameworks.torch.calls import CALLS
from habana_frameworks.torch.utils.internal import is_lazy

if is_lazy():
    from habana_frameworks.torch.hpu.graphs import HPUGraph as HPUGraph
    from habana_frameworks.torch.hpu.graphs import wrap_in_hpu_graph as wrap_in_hpu_graph

_LIMIT, _IN_USE, _PEAK = 1000, 300, 450


def is_available() -> bool:
    """There is one device."""
    return True


def device_count() -> int:
    """A machine of four cards."""
    return 4


def synchronize() -> None:
    """Waits for nothing, and counts."""
    CALLS["synchronize"] += 1


def memory_stats() -> dict[str, int]:
    """The keys of the vendor's allocator that are used."""
    return {"Limit": _LIMIT, "InUse": _IN_USE, "MaxInUse": _PEAK}


def mem_get_info() -> tuple[int, int]:
    """Free bytes and all bytes."""
    return _LIMIT - _IN_USE, _LIMIT


class Stream:
    """A stream without a device."""

    def wait_stream(self, stream: Stream) -> None:
        """Counts the waits."""
        CALLS["wait_stream"] += 1


class Event:
    """An event that is passed once somebody has waited for it."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._is_timed, self._is_passed = enable_timing, False

    def record(self, stream: Stream) -> None:
        """Nothing is queued."""

    def query(self) -> bool:
        """Whether it is passed."""
        return self._is_passed

    def wait(self) -> None:
        """Counts the waits of the current stream."""
        CALLS["wait_event"] += 1

    def synchronize(self) -> None:
        """Waits."""
        self._is_passed = True

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds between two events that are timed."""
        assert self._is_timed
        assert other._is_timed
        return 2.0


def current_stream() -> Stream:
    """The stream that is entered."""
    return Stream()


def default_stream() -> Stream:
    """The stream that everything runs on unless told otherwise."""
    return Stream()


@contextmanager
def stream(which: Stream) -> Iterator[None]:
    """Counts the streams that were entered."""
    CALLS["stream"] += 1
    yield
