"""Seconds that each rank has been at its step, as rank 0 knows, and whether a thread waits for others."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path

_EXCHANGES = (str(Path("hpu_duo", "device", "exchange.py")), str(Path("torch", "distributed")))
"""Parts of the paths of code that waits for other ranks."""


class Lateness:
    """The steps that were sent to ranks, and for how long each has been at the one it has not carried out.

    Orders of a warm-up have no limit: they compile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: set[int] = set()
        self._num_told = 0
        self._num_done: dict[int, int] = {}
        self._late_s: dict[int, float] = {}

    def tell(self, *, is_step: bool) -> None:
        """Note that the next order is sent."""
        with self._lock:
            if is_step:
                self._steps.add(self._num_told)
            self._num_told += 1

    def look(self, num_done: Mapping[int, int], passed_s: float) -> dict[int, float]:
        """Return the seconds of each rank that is at a step.

        Args:
            num_done: orders that each rank has carried out.
            passed_s: seconds since the last look.
        """
        with self._lock:
            for rank, done in num_done.items():
                is_same = self._num_done.get(rank) == done and done in self._steps
                self._late_s[rank] = self._late_s.get(rank, 0.0) + passed_s if is_same else 0.0
                self._num_done[rank] = done
            first = min(num_done.values(), default=0)
            self._steps = {number for number in self._steps if number >= first}
            return {rank: late_s for rank, late_s in self._late_s.items() if rank in num_done}


def waits_for_others(thread_id: int) -> bool:
    """Whether a thread of this process is inside an exchange between ranks, as far as Python shows it."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _EXCHANGES):
            return True
        frame = frame.f_back
    return False
