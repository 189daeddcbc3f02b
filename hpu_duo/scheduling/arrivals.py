"""Requests in the order in which they arrived."""

from __future__ import annotations

from hpu_duo.request import Request
from hpu_duo.scheduling.sorted_queue import SortedQueue


class ArrivalOrder(SortedQueue[Request, int]):
    """A set of requests, iterated from the first arrival to the last, whatever order they came in by."""

    def add(self, request: Request) -> None:
        """Put the request at the place its arrival gives it."""
        self.put(request, request.arrival)

    def remove(self, request: Request) -> None:
        """Take the request out.

        Raises:
            ValueError: it is not in here.
        """
        if not self.discard(request):
            raise ValueError(f"{request} is not among these {len(self)} requests")
