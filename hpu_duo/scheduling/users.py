"""Waiting requests by user, and what users have paid."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpu_duo.request import Request
from hpu_duo.scheduling.arrivals import ArrivalOrder
from hpu_duo.scheduling.policy import Waiting
from hpu_duo.scheduling.sorted_queue import SortedQueue

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
        """Take out a request if it waits; returns whether it was the last one of its user."""
        if request not in self._requests:
            return False
        self._requests.remove(request)
        queue = self._queues[request.params.user]
        queue.remove(request)
        if not queue:
            del self._queues[request.params.user]
        return not queue

    def offered(self, user: User, waiting: Waiting) -> Iterator[Request]:
        """Yield the requests of a user that may be chosen in this step; nobody may come or go meanwhile."""
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
    """Users sorted by a number; of equal numbers, the user comes first who came in first."""

    def __init__(self) -> None:
        super().__init__()
        self._num_users = 0

    def give(self, user: User, number: float) -> None:
        """Give a user a number, or another one."""
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
    """Return the shares of users, of whom others have 1.

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
