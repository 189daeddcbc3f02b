"""Random traffic under a policy that ranks requests, with the order that it promises."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from hpu_duo.request import Request
from tests.engine_host.scheduler_machine import SchedulerMachine

Place = tuple[float, ...]


class RankedMachine(SchedulerMachine):
    """Lower places are admitted first, and higher ones preempted; nobody waits for want of patience."""

    # An earlier arrival that is admitted late takes the place of the one that is never preempted.
    most_wasted = 4

    @abstractmethod
    def place(self, request: Request) -> Place:
        """Return the place of a request, written down otherwise than in the policy."""

    def _place(self, request: Request) -> Place:
        return (*self.place(request), request.arrival)

    def _check_preemptions(
        self, kept: list[Request], preempted: Sequence[Request], running: list[Request]
    ) -> None:
        places = list(map(self._place, preempted))
        assert places == sorted(places, reverse=True)
        assert all(self._place(p) > self._place(k) for p in preempted for k in kept if k is not running[0])

    def _check_order(self, admitted: list[Request], waiting: list[Request]) -> None:
        ordinary = [each for each in admitted if each.parent is None]
        assert all(self._place(a) < self._place(w) for a in ordinary for w in waiting)

    def _next_of(self, waiting: list[Request]) -> Request:
        return min(waiting, key=self._place)
