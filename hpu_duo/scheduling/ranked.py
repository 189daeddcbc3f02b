"""Policies that give each request a rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import inf

from hpu_duo.request import Request
from hpu_duo.scheduling.policy import SchedulingPolicy, Waiting
from hpu_duo.scheduling.sorted_queue import SortedQueue

Rank = tuple[float, ...]


class RankedOrder(SortedQueue[Request, tuple[Rank, int]]):
    """Requests sorted by rank, then by arrival; each keeps the rank that it was added with."""

    def add(self, request: Request, rank: Rank) -> None:
        """Put a request at its place.

        Raises:
            ValueError: it is in here.
        """
        if request in self:
            raise ValueError(f"{request} is ranked already")
        self.put(request, (rank, request.arrival))


class RankedPolicy(SchedulingPolicy):
    """Admits the lowest rank, and preempts the highest; ties go by arrival.

    Ranks of waiting requests are kept sorted, so choosing takes no longer the more of them there are.

    Later arrivals overtake the earliest waiting request ``patience`` times at most; then it is next, and is
    not displaced any more. While it is passed over, others go by arrival. So a request that ``k`` others came
    before waits for ``(k + 1) * patience`` admissions of later ones at most, if nobody is passed over.

    Args:
        patience: infinite = requests of a high rank may wait for ever.
    """

    def __init__(self, patience: float = inf) -> None:
        if not patience >= 0:
            raise ValueError(f"expected patience to be 0 or more, got {patience}")
        self._patience = patience
        self._order = RankedOrder()
        self._overtaken: set[Request] = set()

    @abstractmethod
    def rank(self, request: Request) -> Rank:
        """Return the rank of a request; it may change while the request runs, or by ``rerank``."""

    def rerank(self, request: Request) -> None:
        """Ask for the rank of a request again, if it waits."""
        if request in self._order:
            self._order.put(request, (self.rank(request), request.arrival))

    def next(self, waiting: Waiting) -> Request:
        """Return the lowest rank, or the earliest arrival if the first one was overtaken too often."""
        if waiting.num_overtakes >= self._patience:
            first = waiting.first
            if first is waiting.arrivals.first:  # else it is another one that was overtaken, and passed over
                self._overtaken.add(first)
            return first
        return next(self._order.accepted(waiting.is_offered, waiting.step))

    def victim(self, running: Sequence[Request]) -> Request:
        """Return the highest rank."""
        return max(running, key=self._place)

    def displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Return the highest rank, if it is higher than that of the request."""
        if not self.displaces:
            return None
        others = [other for other in running if other not in self._overtaken]
        worst = max(others, key=self._place, default=None)
        return worst if worst is not None and self.rank(worst) > self.rank(request) else None

    def queued(self, request: Request) -> None:
        """Sort the request in."""
        self._order.add(request, self.rank(request))

    def admitted(self, request: Request) -> None:
        """Take the request out."""
        self._order.discard(request)

    def ended(self, request: Request) -> None:
        """Forget the request."""
        self._order.discard(request)
        self._overtaken.discard(request)

    def _place(self, request: Request) -> tuple[Rank, int]:
        return self.rank(request), request.arrival


class ArrivalRank(RankedPolicy):
    """First come, first served: all have the same rank."""

    def rank(self, request: Request) -> Rank:
        """Return nothing to tell requests apart by."""
        return ()
