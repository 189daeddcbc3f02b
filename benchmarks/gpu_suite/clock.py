"""Timing on a device: warm-up, cold second-level cache, median and spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 1 << 30
"""More than any second-level cache; writing it takes long enough for the host to run ahead."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, least and most of ``rounds`` calls."""

    median_s: float
    low_s: float
    high_s: float
    rounds: int

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """Summarise calls that were timed one by one; at least one."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))

    def values(self) -> dict[str, float]:
        """The seconds as values of a ``Point``."""
        return {"median_s": self.median_s, "low_s": self.low_s, "high_s": self.high_s, "rounds": self.rounds}


@dataclass(frozen=True)
class Clock:
    """Times work on one device.

    On CUDA a call is timed between two events, after a gigabyte has been written: that empties the
    cache, and while it runs the host queues the call, so that launching it is not measured. On a CPU,
    where this script only shows that it works, calls are timed by the wall clock.

    Attributes:
        rounds, warm_up: calls that are timed, and calls before them that are not.
    """

    device: torch.device
    rounds: int = 30
    warm_up: int = 5

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.warm_up < 0:
            raise ValueError(
                f"expected rounds >= 1 and warm_up >= 0, got rounds={self.rounds} warm_up={self.warm_up}"
            )

    def time(self, work: Callable[[], object]) -> Timing:
        """Device seconds of ``work``, every call with a cold cache."""
        for _ in range(self.warm_up):
            work()
        if self.device.type != "cuda":
            return Timing.of([self.wall(work) for _ in range(self.rounds)])
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=self.device)
        pairs = []
        for _ in range(self.rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            work()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize(self.device)
        return Timing.of([begin.elapsed_time(end) / 1e3 for begin, end in pairs])

    def wall(self, work: Callable[[], object]) -> float:
        """Wall seconds of one call, the device idle before and after it."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
