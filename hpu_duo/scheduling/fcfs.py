"""First come, first served."""

from __future__ import annotations

from hpu_duo.request import Request
from hpu_duo.scheduling.policy import SchedulingPolicy, Waiting


class FirstComeFirstServed(SchedulingPolicy):
    """Requests are admitted in order of arrival, and the latest one is preempted first.

    A waiting request never overtakes an earlier one, so none waits for more than those that came before it.
    """

    name = "fcfs"

    def next(self, waiting: Waiting) -> Request:
        """Return the earliest arrival."""
        return waiting.first
