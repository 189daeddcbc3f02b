"""Sources of requests for a simulated server."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from hpu_duo.request import Request


class Arrivals(Protocol):
    """A source of requests on a virtual clock, in its units of time."""

    def due(self, now: float) -> Sequence[Request]:
        """Return the requests that have come by ``now``, each once; siblings follow their parent."""
        ...

    def next_time(self) -> float | None:
        """Return when the next request comes, as far as is known before another one ends; None = never."""
        ...

    def ended(self, request: Request, now: float) -> None:
        """Take note that a request has all of its tokens at ``now``."""
        ...


class Trace:
    """Requests that come at given times, whenever others end.

    Args:
        requests: pairs of time and request; siblings come at the time of their parent and after it in the
            list. Requests of the same time come in this order.
    """

    def __init__(self, requests: Iterable[tuple[float, Request]]) -> None:
        self._coming = deque(sorted(requests, key=_time))

    def due(self, now: float) -> list[Request]:
        """Return the requests whose time has come."""
        found = []
        while self._coming and self._coming[0][0] <= now:
            found.append(self._coming.popleft()[1])
        return found

    def next_time(self) -> float | None:
        """Return the time of the first request that is left."""
        return self._coming[0][0] if self._coming else None

    def ended(self, request: Request, now: float) -> None:
        """Do nothing: no request of a trace waits for the end of another one."""


def _time(coming: tuple[float, Request]) -> float:
    return coming[0]
