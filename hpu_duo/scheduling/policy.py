"""The interface of scheduling policies, and the waiting queue that they choose from."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from hpu_duo.request import Request

if TYPE_CHECKING:
    from _typeshed import SupportsRichComparison


Item = TypeVar("Item", bound=Hashable)
Key = TypeVar("Key", bound="SupportsRichComparison")


class SortedQueue(Generic[Item, Key]):
    """Items in the order of keys, no two of which are equal.

    Items may be refused for a step. Rejected leading items are not tested again in that step, so finding the
    first accepted one ``n`` times in a queue of ``n`` needs at most ``2 * n`` tests.
    """

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._items: list[Item] = []
        self._key_of: dict[Item, Key] = {}
        # Leading items that were refused in a step.
        self._num_refused, self._step = 0, -1

    def put(self, item: Item, key: Key) -> None:
        """Insert or move an item; it may have been rejected before.

        The item is to be tested again, and so are those after it.
        """
        self.discard(item)
        place = bisect_left(self._keys, key)
        self._keys.insert(place, key)
        self._items.insert(place, item)
        self._key_of[item] = key
        self._num_refused = min(self._num_refused, place)

    def discard(self, item: Item) -> bool:
        """Remove an item if present; returns whether it was."""
        if item not in self._key_of:
            return False
        place = bisect_left(self._keys, self._key_of.pop(item))
        del self._keys[place], self._items[place]
        self._num_refused -= place < self._num_refused
        return True

    def accepted(self, accepts: Callable[[Item], bool], step: int) -> Iterator[Item]:
        """Yield the items that are accepted, in order; the queue must not change meanwhile.

        Args:
            accepts: whether an item is acceptable; rejected ones stay so in this step, unless inserted again.
            step: number of the step.
        """
        if step != self._step:
            self._num_refused, self._step = 0, step
        while self._num_refused < len(self._items) and not accepts(self._items[self._num_refused]):
            self._num_refused += 1
        for place in range(self._num_refused, len(self._items)):
            if accepts(self._items[place]):
                yield self._items[place]

    def first_accepted(self, accepts: Callable[[Item], bool], step: int) -> Item | None:
        """Return the first item that is accepted, None if there is none; see ``accepted``."""
        return next(self.accepted(accepts, step), None)

    @property
    def first(self) -> Item:
        """The item of the least key; there must be one."""
        return self._items[0]

    @property
    def last(self) -> Item:
        """The item of the greatest key; there must be one."""
        return self._items[-1]

    @property
    def least(self) -> Key:
        """The least key; there must be one."""
        return self._keys[0]

    def __contains__(self, item: object) -> bool:
        return item in self._key_of

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)


class ArrivalOrder(SortedQueue[Request, int]):
    """A set of requests, iterated in order of arrival."""

    def add(self, request: Request) -> None:
        """Insert the request by its arrival."""
        self.put(request, request.arrival)

    def remove(self, request: Request) -> None:
        """Remove the request.

        Raises:
            ValueError: it is not in here.
        """
        if not self.discard(request):
            raise ValueError(f"{request} is not among these {len(self)} requests")


class SchedulingPolicy(ABC):
    """The order of waiting requests, the victims of preemption, and accounting of service.

    A policy chooses between requests and owns none of them: rows, blocks, budgets and the guarantee of
    progress stay with the scheduler. So a policy may be unfair, but it cannot stall the engine. When blocks
    run out, the earliest arrival among running requests is never a candidate for preemption. A running
    request is a candidate of ``displaced`` only if it got a token since its admission, or if the waiting one
    never ran, so requests cannot displace each other endlessly. The chosen request blocks others until it
    fits.

    ``next`` is the only method that a policy has to have. The last four are callbacks: a request is queued,
    admitted, perhaps preempted and queued again, and ends once, in any state.

    Attributes:
        honours_priority: whether ``SamplingParams.priority`` has a meaning; requests that set it are refused
            where it has none.
        displaces: whether ``displaced`` ever returns a request.
        needs_scores: whether it reads ``Request.score``, which a ranker computes.
        name: the specification that it was created from.
    """

    displaces: ClassVar[bool] = False
    honours_priority: bool = False
    needs_scores: bool = False
    name: str = "of its own"

    @abstractmethod
    def next(self, waiting: Waiting) -> Request:
        """Choose the waiting request to admit next; no other one is admitted before it.

        Called again after each admission, and in every step.

        Args:
            waiting: at least one request; those that were preempted are back among them.
        """

    def victim(self, running: Sequence[Request]) -> Request:
        """Choose the request to preempt because another one lacks a block; it may be that one itself.

        By default the latest arrival.

        Args:
            running: those that may be, at least one, in order of arrival.
        """
        return running[-1]

    def displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Choose a running request to preempt for a waiting one that does not fit; None = it waits.

        Called again until it fits; none is preempted if it would not fit in the end.

        Args:
            request: the one that ``next`` chose.
            running: those that may be displaced, in order of arrival.
        """
        return None

    def begin_step(self) -> None:  # noqa: B027
        """Called when a step is planned."""

    def queued(self, request: Request) -> None:  # noqa: B027
        """Called when a request is queued, because it is new or was preempted."""

    def admitted(self, request: Request) -> None:  # noqa: B027
        """Called when a request is admitted; ``num_computed_tokens`` of its tokens are in the cache."""

    def charge(self, request: Request, num_computed: int, num_sampled: int) -> None:  # noqa: B027
        """Called with the service of a step for a request, after its tokens are appended.

        Args:
            num_computed: computed tokens, recomputed ones included.
            num_sampled: tokens that it got.
        """

    def ended(self, request: Request) -> None:  # noqa: B027
        """Called when a request has ended, waiting or running, complete or early."""


class CachedPrefix(Protocol):
    """Cached blocks that a request begins with."""

    @property
    def path(self) -> Sequence[Any]:
        """An object for each cached block that the request begins with; the same for all that begin alike."""
        ...

    @property
    def num_usable(self) -> int:
        """Leading ones of them that the request would reuse."""
        ...


class Waiting:
    """Requests without a row, in order of arrival, as a policy chooses among them.

    Iteration, ``first`` and the length leave out requests that were passed over in this step: those that
    wait for a prefix which another request is computing.

    Args:
        policy: notified of queued requests.
        find: looks a request up in the prefix cache.
        num_tokens: returns the tokens of a hit, which a request does not compute; None = one for each block.

    Attributes:
        arrivals: all of them.
        num_overtakes: admissions of later arrivals since the earliest waiting request became the earliest.
        step: number of the step that is planned. Who is passed over stays so until the next one.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        find: Callable[[Request], CachedPrefix | None] | None = None,
        num_tokens: Callable[[Any], int] | None = None,
    ) -> None:
        self._policy, self._find = policy, find
        self._num_tokens: Callable[[Any], int] = num_tokens or attrgetter("num_usable")
        self.arrivals = ArrivalOrder()
        self.num_overtakes = self.step = 0
        self._passed: set[Request] = set()

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.arrivals.add(request)
        self._policy.queued(request)

    def remove(self, request: Request) -> None:
        """Remove a request that ends.

        Raises:
            ValueError: it does not wait.
        """
        was_first = bool(self.arrivals) and request is self.arrivals.first
        self.arrivals.remove(request)
        self._passed.discard(request)
        if was_first:
            self.num_overtakes = 0

    def admit(self, request: Request) -> None:
        """Remove a request that is admitted.

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
        assert request not in self._passed, f"expected the policy to choose another request than {request}"
        return request

    def pass_over(self, request: Request) -> None:
        """Offer a request no more in this step."""
        self._passed.add(request)

    def is_offered(self, request: Request) -> bool:
        """Whether a request that waits may be chosen."""
        return request not in self._passed

    def find(self, request: Request) -> CachedPrefix | None:
        """Return the prefix cache's hit for a request; None without a cache."""
        return None if self._find is None else self._find(request)

    def num_cached_tokens(self, request: Request) -> int:
        """Return the number of tokens that a request would reuse from the prefix cache."""
        found = self.find(request)
        return 0 if found is None else self._num_tokens(found)

    @property
    def first(self) -> Request:
        """The earliest arrival that may be chosen; there must be one."""
        return next(iter(self))

    def __len__(self) -> int:
        return len(self.arrivals) - len(self._passed)

    def __iter__(self) -> Iterator[Request]:
        return self.arrivals.accepted(self.is_offered, self.step)


class IdleTimes:
    """Steps since each waiting request was queued, or promoted for the last time.

    Attributes:
        step: number of steps planned so far.
    """

    def __init__(self) -> None:
        self.step = 0
        # In the order of these steps, since each comes to the end when its step is set.
        self._since: dict[Request, int] = {}

    def begin(self, request: Request) -> None:
        """Count steps of a request from now on."""
        self._since.pop(request, None)
        self._since[request] = self.step

    def end(self, request: Request) -> None:
        """Stop counting."""
        self._since.pop(request, None)

    def take_idle(self, num_steps: float) -> list[Request]:
        """Return the requests that have waited for a number of steps, and reset their counts."""
        found = []
        for request, since in self._since.items():
            if self.step - since < num_steps:
                break
            found.append(request)
        for request in found:
            self.begin(request)
        return found


User = str | None


class UserQueues:
    """Waiting requests of each user, in order of arrival."""

    def __init__(self) -> None:
        self._queues: dict[User, ArrivalOrder] = {}
        self._requests: set[Request] = set()

    def add(self, request: Request) -> bool:
        """Queue a request; returns whether its user had none."""
        self._requests.add(request)
        is_first = request.params.user not in self._queues
        self._queues.setdefault(request.params.user, ArrivalOrder()).add(request)
        return is_first

    def discard(self, request: Request) -> bool:
        """Remove a request if it waits; returns whether it was the last one of its user."""
        if request not in self._requests:
            return False
        self._requests.remove(request)
        queue = self._queues[request.params.user]
        queue.remove(request)
        if not queue:
            del self._queues[request.params.user]
        return not queue

    def offered(self, user: User, waiting: Waiting) -> Iterator[Request]:
        """Yield the candidates of a user in this step; the queue must not change meanwhile."""
        queue = self._queues.get(user)
        return iter(()) if queue is None else queue.accepted(waiting.is_offered, waiting.step)

    def first_of(self, user: User) -> Request:
        """Return the earliest waiting request of a user who has one."""
        return self._queues[user].first

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def __len__(self) -> int:
        """Return the number of users who wait."""
        return len(self._queues)

    def __iter__(self) -> Iterator[User]:
        return iter(self._queues)


class LeastFirst(SortedQueue[User, tuple[float, int]]):
    """Users sorted by a number, ties by insertion."""

    def __init__(self) -> None:
        super().__init__()
        self._num_users = 0

    def give(self, user: User, number: float) -> None:
        """Set the number of a user."""
        if user in self:
            order = self._key_of[user][1]
        else:
            self._num_users += 1
            order = self._num_users
        self.put(user, (number, order))

    @property
    def least_number(self) -> float:
        """The least number; there must be a user."""
        return self.least[0]


def read_weights(weights: str | Mapping[User, float]) -> dict[User, float]:
    """Return the weights of users; others have 1.

    Args:
        weights: by user, or a JSON file with an object of them; "" for none.

    Raises:
        ValueError: the file cannot be read, or a weight is not a number above 0.
    """
    if isinstance(weights, str):
        if not weights:
            return {}
        try:
            weights = json.loads(Path(weights).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read weights of users from {weights}: {error}") from error
    if not isinstance(weights, Mapping):
        raise ValueError(f"expected weights to be a JSON object of users and numbers, got {weights!r}")
    for user, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ValueError(f"expected the weight of user {user!r} to be a number above 0, got {weight!r}")
    return dict(weights)
