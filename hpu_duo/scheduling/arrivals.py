"""Requests in the order in which they arrived."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from hpu_duo.request import Request


def _arrival(request: Request) -> int:
    return request.arrival


class ArrivalOrder:
    """A set of requests, iterated from the first arrival to the last, whatever order they came in by."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        """Put the request at the place its arrival gives it."""
        insort(self._requests, request, key=_arrival)

    def remove(self, request: Request) -> None:
        """Take the request out.

        Raises:
            ValueError: it is not in here.
        """
        index = bisect_left(self._requests, request.arrival, key=_arrival)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"{request} is not among these {len(self._requests)} requests")
        del self._requests[index]

    @property
    def first(self) -> Request:
        """The earliest arrival."""
        return self._requests[0]

    @property
    def last(self) -> Request:
        """The latest arrival."""
        return self._requests[-1]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)
