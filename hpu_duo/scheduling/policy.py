"""The choices of a scheduler that a policy makes, and the waiting requests that it chooses from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

from hpu_duo.request import Request
from hpu_duo.scheduling.arrivals import ArrivalOrder


class SchedulingPolicy(ABC):
    """Order of waiting requests, whom to preempt, and what to charge for.

    A policy chooses between requests and owns none of them: rows, blocks, budgets and the guarantee of
    progress stay with the scheduler. So a policy may be unfair, but it cannot stall the engine. When blocks
    run out, the earliest arrival among running requests is never offered for preemption and gets its tokens.
    A running request is offered to ``displaced`` only if it has got a token since it got its row, or to one
    that never had a row, so requests cannot take turns in displacing each other without end. Whoever is
    chosen to be admitted next is waited for until it fits.

    ``next`` is the only method that a policy has to have. The last four tell it what happens: a request is
    queued, admitted, perhaps preempted and queued again, and ends once, wherever it is.

    Attributes:
        honours_priority: whether ``SamplingParams.priority`` has a meaning; requests that set it are refused
            where it has none.
        displaces: whether ``displaced`` ever names anybody.
        needs_scores: whether it reads ``Request.score``, which a ranker gives.
        name: what it was made from.
    """

    displaces: ClassVar[bool] = False
    honours_priority: bool = False
    needs_scores: bool = False
    name: str = "of its own"

    @abstractmethod
    def next(self, waiting: Waiting) -> Request:
        """Choose the waiting request to admit next; nobody else is admitted before it.

        Asked again after each admission, and in every step.

        Args:
            waiting: at least one request; those that were preempted are back among them.
        """

    def victim(self, running: Sequence[Request]) -> Request:
        """Choose whom to preempt, because another one lacks a block; it may be that one itself.

        The latest arrival, unless a policy says otherwise.

        Args:
            running: those that may be, at least one, in order of arrival.
        """
        return running[-1]

    def displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Choose who gives its row and blocks to a waiting request that does not fit; None = it waits.

        Asked again until it fits; nobody is preempted if it would not fit in the end.

        Args:
            request: the one that ``next`` chose.
            running: those that may be displaced, in order of arrival.
        """
        return None

    def begin_step(self) -> None:  # noqa: B027
        """Take note that a step is planned."""

    def queued(self, request: Request) -> None:  # noqa: B027
        """Take note that a request waits, because it is new or was preempted."""

    def admitted(self, request: Request) -> None:  # noqa: B027
        """Take note that a request has got a row; ``num_computed_tokens`` of its tokens are in the cache."""

    def charge(self, request: Request, num_computed: int, num_sampled: int) -> None:  # noqa: B027
        """Take note of what a step has done for a request, once its tokens are appended.

        Args:
            num_computed: tokens whose keys and values were computed, again where it had been preempted.
            num_sampled: tokens that it got.
        """

    def ended(self, request: Request) -> None:  # noqa: B027
        """Take note that a request has ended, waiting or running, with all of its tokens or early."""


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
