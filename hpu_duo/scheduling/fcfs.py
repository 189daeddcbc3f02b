"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from hpu_duo.request import Request
from hpu_duo.scheduling.arrivals import ArrivalOrder


class FirstComeFirstServed:
    """Requests are admitted in order of arrival, and the latest one is preempted first.

    A waiting request never overtakes an earlier one, so none waits for more than those that came before it.
    """

    def next(self, waiting: ArrivalOrder) -> Request:
        """Return the earliest arrival."""
        return waiting.first

    def victim(self, running: Sequence[Request]) -> Request:
        """Return the latest arrival."""
        return running[-1]

    def charge(self, request: Request, num_computed: int, num_sampled: int) -> None:
        """Do nothing: what a request has had does not matter."""
