"""Requests that wait, as a policy sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from hpu_duo.request import Request
from hpu_duo.scheduling.arrivals import ArrivalOrder
from hpu_duo.scheduling.policy import SchedulingPolicy


class CachedPrefix(Protocol):
    """Cached blocks that a request begins with."""

    @property
    def path(self) -> Sequence[Any]:
        """An object for each cached block that the request begins with; the same for all that begin alike."""
        ...

    @property
    def num_usable(self) -> int:
        """Leading blocks of them that the request would take up."""
        ...


class Waiting:
    """Requests without a row, in order of arrival, as a policy chooses among them.

    Iteration, ``first`` and the length leave out requests that were passed over in this step: those that
    wait for a prefix which another request is computing.

    Args:
        policy: is told who waits.
        find: looks a request up in the prefix cache.
        block_size: tokens of a block of that cache.

    Attributes:
        arrivals: all of them.
        num_overtakes: admissions since the earliest of them became the earliest, of requests that came later
            than it did.
        step: number of the step that is planned. Who is passed over stays so until the next one.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        find: Callable[[Request], CachedPrefix | None] | None = None,
        block_size: int = 1,
    ) -> None:
        self._policy, self._find, self._block_size = policy, find, block_size
        self.arrivals = ArrivalOrder()
        self.num_overtakes = self.step = 0
        self._passed: set[Request] = set()

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.arrivals.add(request)
        self._policy.queued(request)

    def remove(self, request: Request) -> None:
        """Take out a request that ends.

        Raises:
            ValueError: it does not wait.
        """
        was_first = bool(self.arrivals) and request is self.arrivals.first
        self.arrivals.remove(request)
        self._passed.discard(request)
        if was_first:
            self.num_overtakes = 0

    def admit(self, request: Request) -> None:
        """Take out a request that gets a row.

        Raises:
            ValueError: it does not wait.
        """
        if request is not self.arrivals.first:
            self.num_overtakes += 1
        self.remove(request)

    def begin_step(self) -> None:
        """Offer everybody again."""
        self.step += 1
        self._passed.clear()
        self._policy.begin_step()

    def next(self) -> Request:
        """The policy's choice among those that were not passed over, at least one."""
        request = self._policy.next(self)
        assert request not in self._passed, f"expected the policy to choose somebody else than {request}"
        return request

    def pass_over(self, request: Request) -> None:
        """Offer a request no more in this step."""
        self._passed.add(request)

    def is_offered(self, request: Request) -> bool:
        """Whether a request that waits may be chosen."""
        return request not in self._passed

    def find(self, request: Request) -> CachedPrefix | None:
        """Return what the prefix cache has of a request; None without one."""
        return None if self._find is None else self._find(request)

    def num_cached_tokens(self, request: Request) -> int:
        """Return the tokens that a request would take up from the prefix cache."""
        found = self.find(request)
        return 0 if found is None else found.num_usable * self._block_size

    @property
    def first(self) -> Request:
        """The earliest arrival that may be chosen; there must be one."""
        return next(iter(self))

    def __len__(self) -> int:
        return len(self.arrivals) - len(self._passed)

    def __iter__(self) -> Iterator[Request]:
        return self.arrivals.accepted(self.is_offered, self.step)
