"""Fair shares and cached prefixes: virtual token counters, cache-aware order, and deficit longest match."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Container, Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice
from math import floor, inf
from typing import Any

from hpu_duo.request import Request, RequestStatus
from hpu_duo.scheduling.policy import LeastFirst, SchedulingPolicy, User, UserQueues, Waiting, read_weights
from hpu_duo.scheduling.ranked import LENGTHS, PATIENCE, OutputLengths, make_lengths

WINDOW = 128
"""Requests that are looked up in the prefix cache in one step, the earliest ones."""


class CacheAware(SchedulingPolicy):
    """Orders the earliest waiting requests by what is cached of them, anew in every step.

    Requests with a cached prefix are admitted before those without, as long as such requests arrive. The
    earliest waiting request is overtaken ``patience`` times at most; see ``RankedPolicy``.

    Args:
        window: earliest requests that are ordered; 1 or more.
        patience: infinite = requests that share nothing may wait for ever.
    """

    def __init__(self, window: int = WINDOW, patience: float = PATIENCE) -> None:
        if window < 1 or not patience >= 0:
            raise ValueError(
                f"expected window to be 1 or more and patience 0 or more, got {window} and {patience}"
            )
        self._window, self._patience = window, patience
        # Of this step; requests before the index are admitted or skipped.
        self._order: list[Request] = []
        self._place = 0

    @abstractmethod
    def order(self, requests: Sequence[Request], waiting: Waiting) -> list[Request]:
        """Return the requests, which come in order of arrival, in the order to admit them."""

    def begin_step(self) -> None:
        """Recompute the order at the next admission: the cache may have changed."""
        self._order, self._place = [], 0

    def queued(self, request: Request) -> None:
        """Restart at the beginning of the order, or compute it again if the request is not in it.

        One that was admitted before the order was computed, as the earliest, may be preempted in the same
        step.
        """
        if self._order and request not in self._order:
            self._order = []
        self._place = 0

    def next(self, waiting: Waiting) -> Request:
        """Return the first one that is left, or the earliest if arrivals were overtaken too often."""
        if waiting.num_overtakes >= self._patience:
            return waiting.first
        found = self._first(waiting)
        if found is None:
            self._order, self._place = self.order(list(islice(waiting, self._window)), waiting), 0
            found = self._first(waiting)
        assert found is not None, f"none of {len(self._order)} requests waits"
        return found

    def _first(self, waiting: Waiting) -> Request | None:
        while self._place < len(self._order):
            request = self._order[self._place]
            if request.status is RequestStatus.WAITING and waiting.is_offered(request):
                return request
            self._place += 1
        return None


class LongestPrefixMatch(CacheAware):
    """Requests of which most is cached are admitted first, then by arrival.

    Source: RadixAttention, Zheng et al. 2024 (arXiv:2312.07104), with a bound on how long others wait.
    """

    def order(self, requests: Sequence[Request], waiting: Waiting) -> list[Request]:
        """Return the requests by cached tokens."""
        return sorted(requests, key=lambda each: (-waiting.num_cached_tokens(each), each.arrival))


class DepthFirst(CacheAware):
    """Traverses the tree of cached prefixes depth first, branches with most waiting requests first.

    So requests under one prefix are admitted together, before it is evicted.

    Source: the policy ``dfs-weight`` of SGLang.
    """

    def order(self, requests: Sequence[Request], waiting: Waiting) -> list[Request]:
        """Return the requests in the order of the traversal; those that end at a node follow its branches."""
        paths = [_usable_path(request, waiting) for request in requests]
        weights: Counter[Any] = Counter(node for path in paths for node in path)
        numbers = {node: number for number, node in enumerate(weights)}
        keys = [
            (*((-weights[node], numbers[node]) for node in path), (1, request.arrival))
            for path, request in zip(paths, requests)
        ]
        return [requests[place] for place in sorted(range(len(requests)), key=keys.__getitem__)]


def _usable_path(request: Request, waiting: Waiting) -> Sequence[Any]:
    found = waiting.find(request)
    return () if found is None else found.path[: found.num_usable]


class CachedShareGroups(CacheAware):
    """Requests of which more is cached are admitted more often, and none waits for ever.

    Requests of which the ``g``-th part of ``groups`` equal parts is cached are group ``g``, from 0. While all
    groups have requests waiting, group ``g`` gets ``g + 1`` of each ``groups * (groups + 1) / 2`` admissions,
    spread evenly; within a group the earliest is first. An empty group accumulates no credit.

    A request changes groups when the cache does. The earliest waiting one is always the first of its group,
    so it is overtaken at most ``groups * (groups + 3) / 2`` times while it stays there.

    Args:
        groups: 1 or more; 1 is ``fcfs``.
        window: earliest requests that are looked up in a step; 1 or more.

    Source: the local scheduler of Preble, Srivatsa et al. 2024 (arXiv:2407.00023). The proportions are those
    of stride scheduling, Waldspurger and Weihl 1995.
    """

    def __init__(self, groups: int = 10, window: int = WINDOW) -> None:
        super().__init__(window, patience=inf)
        if groups < 1:
            raise ValueError(f"expected groups of scheduling_policy 'preble' to be 1 or more, got {groups}")
        # Of each group: admissions divided by its priority, on a clock that all groups share.
        self._served = [0.0] * groups
        self._clock = 0.0

    def order(self, requests: Sequence[Request], waiting: Waiting) -> list[Request]:
        """Return the requests in order of admission without new arrivals."""
        queues: dict[int, deque[Request]] = {}
        for request in requests:
            group = self._group(request, waiting.num_cached_tokens(request))
            queues.setdefault(group, deque()).append(request)
        served = {group: max(self._served[group], self._clock) for group in queues}
        ordered = []
        while queues:
            group = min(queues, key=lambda each: (served[each], -each))
            ordered.append(queues[group].popleft())
            served[group] += 1 / (group + 1)
            if not queues[group]:
                del queues[group]
        return ordered

    def admitted(self, request: Request) -> None:
        """Count the admission for the group of the request."""
        group = self._group(request, request.num_computed_tokens)
        self._clock = max(self._served[group], self._clock)
        self._served[group] = self._clock + 1 / (group + 1)

    def _group(self, request: Request, num_cached: int) -> int:
        return min(num_cached * len(self._served) // request.num_tokens, len(self._served) - 1)


_MOST_IDLE = 1024
"""Minimum number of stored counters; beyond it, redundant ones are dropped."""


class VirtualTokenCounter(SchedulingPolicy):
    """Admits the earliest request of the user who has had the least, and counts what each user has.

    A user pays for the prompt when a request is first admitted, and for each token of the output. Tokens that
    the prefix cache has are paid for like others; see ``dlpm``. The counter of a returning user is raised to
    the least of waiting users, or if there are none, to that of the last user who waited. So idle users
    accumulate no credit.

    The service of two users who both always have a request waiting differs by ``2 * max(input_price * longest
    prompt, output_price * tokens that run at a time)`` at most, prompts and outputs together, if no request
    is preempted or skipped and their weights are 1.

    When blocks run out, the latest request of the user who has had the most is preempted. It is not paid for
    again.

    Args:
        input_price, output_price: of a token.
        lengths: with "stated" or "recent" (see ``sjf``) the expected output is charged in advance, and the
            difference when it is known; "none" charges tokens as they are sampled.
        weights: share of each user, others have 1: twice the weight is twice the service. A JSON file with an
            object, or a mapping.

    Source: Sheng et al. 2024, Fairness in Serving Large Language Models (arXiv:2401.00588).
    """

    def __init__(
        self,
        input_price: float = 1.0,
        output_price: float = 2.0,
        lengths: str = "none",
        weights: str | Mapping[User, float] = "",
    ) -> None:
        check_prices(input_price, output_price)
        if lengths not in ("none", *LENGTHS):
            raise ValueError(f"expected lengths to be one of none, {', '.join(LENGTHS)}, got {lengths!r}")
        self._input_price, self._output_price = input_price, output_price
        self._lengths: OutputLengths | None = None if lengths == "none" else make_lengths(lengths)
        self._weights = read_weights(weights)
        self._queues = UserQueues()
        self._counters: dict[User, float] = {}
        self._waiting = LeastFirst()
        self._last_to_leave: User = None
        # Requests that were queued and never admitted; tokens paid for in advance, and not had yet.
        self._new: set[Request] = set()
        self._unfinished: set[Request] = set()
        self._most_counters = _MOST_IDLE
        self._advance: dict[Request, float] = {}

    def counter(self, user: User) -> float:
        """Return what a user has paid so far, lifts included, divided by the weight."""
        return self._counters.get(user, 0.0)

    def next(self, waiting: Waiting) -> Request:
        """Return the earliest request of the user who has paid least."""
        users = self._waiting.accepted(lambda user: self._first_of(user, waiting) is not None, waiting.step)
        first = self._first_of(next(users), waiting)
        assert first is not None, "the user has one"
        return first

    def victim(self, running: Sequence[Request]) -> Request:
        """Return the latest request of the user who has paid most."""
        return max(running, key=lambda each: (self.counter(each.params.user), each.arrival))

    def queued(self, request: Request) -> None:
        """Raise the counter of a returning user."""
        user = request.params.user
        self._unfinished.add(request)
        is_new = request.admitted_at is None
        if is_new:
            self._new.add(request)
        comes_back = self._queues.add(request)
        if comes_back and is_new:
            floor = self._waiting.least_number if self._waiting else self.counter(self._last_to_leave)
            self._counters[user] = max(self.counter(user), floor)
        # Also for a waiting user: there may be candidates again.
        self._waiting.give(user, self.counter(user))
        if comes_back:
            self._forget_idle()

    def admitted(self, request: Request) -> None:
        """Let the user pay for the prompt, the first time, and for the output that is expected."""
        self._unfinished.add(request)
        if request in self._new:
            cost = self._input_price * request.num_prompt_tokens
            if self._lengths is not None:
                self._advance[request] = self._lengths.of(request)
                cost += self._output_price * self._advance[request]
            self._pay(request.params.user, cost)
        self._leave(request)

    def charge(self, request: Request, num_computed: int, num_sampled: int) -> None:
        """Let the user pay for the tokens of the output that were not paid for in advance."""
        if not num_sampled:
            return
        advance = self._advance.get(request, 0.0)
        if advance:
            self._advance[request] = max(0.0, advance - num_sampled)
        self._pay(request.params.user, self._output_price * max(0.0, num_sampled - advance))

    def ended(self, request: Request) -> None:
        """Refund expected tokens that were not sampled."""
        self._unfinished.discard(request)
        self._leave(request)
        self._pay(request.params.user, -self._output_price * self._advance.pop(request, 0.0))
        if self._lengths is not None:
            self._lengths.ended(request)

    def _first_of(self, user: User, waiting: Waiting) -> Request | None:
        return next(self._queues.offered(user, waiting), None)

    def _pay(self, user: User, cost: float) -> None:
        self._counters[user] = self.counter(user) + cost / self._weights.get(user, 1.0)
        if user in self._waiting:
            self._waiting.give(user, self._counters[user])

    def _leave(self, request: Request) -> None:
        """Remove a request from the queue, if it is there."""
        self._new.discard(request)
        user = request.params.user
        if self._queues.discard(request):
            self._waiting.discard(user)
            self._last_to_leave = user

    def _forget_idle(self) -> None:
        """Drop redundant counters: returning users would be raised above them."""
        if len(self._counters) > self._most_counters:
            floor, unfinished = (
                self._waiting.least_number,
                {request.params.user for request in self._unfinished},
            )
            self._counters = {
                user: each for user, each in self._counters.items() if each > floor or user in unfinished
            }
            self._most_counters = max(_MOST_IDLE, 2 * len(self._counters))


def check_prices(input_price: float, output_price: float) -> None:
    """Raise ValueError for prices below 0, and infinite ones.

    Raises:
        ValueError: one is not in the range.
    """
    for name, price in (("input_price", input_price), ("output_price", output_price)):
        if not 0 <= price < float("inf"):
            raise ValueError(f"expected {name} to be a number of 0 or more, got {price}")


_Choice = tuple[int, int, Request]
"""Cached tokens as a negative number, place by arrival, and the request."""


class DeficitLongestPrefixMatch(SchedulingPolicy):
    """Admits the request with the longest cached prefix, among those of users with a credit above 0.

    Users pay for tokens of prompts that are computed, not for those that the prefix cache has, and for tokens
    of outputs. When no waiting user has credit, all get ``quantum`` more, repeatedly if needed. The service
    of two users who both always have a request waiting differs by ``2 * (quantum + input_price * longest
    prompt + output_price * tokens that run at a time)`` at most. A small quantum is like ``vtc``; an infinite
    one is ``lpm``.

    A user without requests loses credit, and pays off debts with the quanta that others get meanwhile.

    Args:
        quantum: credit per round, above 0.
        input_price, output_price: of a token.
        window: requests that are looked up in the prefix cache in one step, the earliest of each user.
        patience: times that the earliest request of a user is overtaken by others of the same user.

    Source: Cao et al. 2025, Locality-aware Fair Scheduling in LLM Serving (arXiv:2501.14312); what becomes of
    a user who leaves is not stated there.
    """

    def __init__(
        self,
        quantum: float = 4096.0,
        input_price: float = 1.0,
        output_price: float = 2.0,
        window: int = WINDOW,
        patience: float = PATIENCE,
    ) -> None:
        check_prices(input_price, output_price)
        if not quantum > 0:
            raise ValueError(f"expected quantum to be above 0, got {quantum}")
        if window < 1 or not patience >= 0:
            raise ValueError(
                f"expected window to be 1 or more and patience 0 or more, got {window} and {patience}"
            )
        self._quantum, self._window, self._patience = quantum, window, patience
        self._input_price, self._output_price = input_price, output_price
        self._queues = UserQueues()
        self._credits: dict[User, float] = {}
        # Requests of each user that have not ended, and those of them that were queued and never admitted.
        self._unfinished: dict[User, set[Request]] = {}
        self._new: set[Request] = set()
        # Admissions since the earliest request of a user became so, of its later ones.
        self._num_overtakes: Counter[User] = Counter()
        # Of this step: cached tokens of the requests that were looked up. Candidates are in the heap, longest
        # cached prefix first, or set aside because their users have no credit.
        self._num_cached: dict[Request, int] = {}
        self._is_looked_up = False
        self._choices: list[_Choice] = []
        self._aside: dict[User, list[_Choice]] = {}
        self._num_choices: Counter[User] = Counter()

    def credit(self, user: User) -> float:
        """Return the credit of a user; debts are negative."""
        return self._credits.get(user, 0.0)

    def begin_step(self) -> None:
        """Look requests up again at the next admission: the cache may have changed."""
        self._num_cached.clear()
        self._forget_choices()

    def next(self, waiting: Waiting) -> Request:
        """Return the request of which most is cached, of users with credit; all get some if none has."""
        if not self._is_looked_up:
            self._is_looked_up = True
            for user in self._queues:
                self._look_up(user, waiting)
        while (chosen := self._best(waiting)) is None:
            most = max(map(self.credit, self._aside))
            self._give(1 if self._quantum == inf else floor(-most / self._quantum) + 1, self._aside)
            for user in [user for user in self._aside if self.credit(user) > 0]:
                for choice in self._aside.pop(user):
                    heappush(self._choices, choice)
        user = chosen.params.user
        if self._num_overtakes[user] < self._patience:
            return chosen
        return next(self._queues.offered(user, waiting))

    def victim(self, running: Sequence[Request]) -> Request:
        """Return the latest request of the user who has the least credit."""
        return min(running, key=lambda each: (self.credit(each.params.user), -each.arrival))

    def queued(self, request: Request) -> None:
        """Queue the request; a returning user has no credit left."""
        user = request.params.user
        if request.admitted_at is None:
            self._new.add(request)
        if user not in self._unfinished:
            self._credits[user] = min(0.0, self.credit(user))
        self._unfinished.setdefault(user, set()).add(request)
        self._queues.add(request)
        self._forget_choices()

    def admitted(self, request: Request) -> None:
        """Let the user pay for the tokens of the prompt that are not cached, the first time."""
        user = request.params.user
        self._unfinished.setdefault(user, set()).add(request)
        if request in self._new:
            self._pay(user, self._input_price * (request.num_prompt_tokens - request.num_computed_tokens))
        self._leave(request)

    def charge(self, request: Request, num_computed: int, num_sampled: int) -> None:
        """Let the user pay for tokens of the output."""
        self._pay(request.params.user, self._output_price * num_sampled)

    def ended(self, request: Request) -> None:
        """Forget the request, and the user's credit if it was the last one."""
        user = request.params.user
        self._leave(request)
        requests = self._unfinished[user]
        requests.discard(request)
        if not requests:
            del self._unfinished[user]
            if self.credit(user) >= 0:
                self._credits.pop(user, None)

    def _pay(self, user: User, cost: float) -> None:
        self._credits[user] = self.credit(user) - cost

    def _give(self, num_quanta: int, waiting: Container[User]) -> None:
        """Give quanta to waiting users; those of others pay off debts."""
        for user, credit in list(self._credits.items()):
            raised = credit + num_quanta * self._quantum
            if user in waiting:
                self._credits[user] = raised
            elif user in self._unfinished:
                self._credits[user] = max(credit, min(0.0, raised))
            elif raised >= 0:
                del self._credits[user]
            else:
                self._credits[user] = raised

    def _leave(self, request: Request) -> None:
        """Remove a request from the queue, if it is there."""
        self._new.discard(request)
        user = request.params.user
        if request not in self._queues:
            return
        is_first = request is self._queues.first_of(user)
        self._num_overtakes[user] = 0 if is_first else self._num_overtakes[user] + 1
        if self._queues.discard(request):
            del self._num_overtakes[user]

    def _forget_choices(self) -> None:
        self._is_looked_up = False
        self._choices.clear()
        self._aside.clear()
        self._num_choices.clear()

    def _look_up(self, user: User, waiting: Waiting) -> None:
        """Add the earliest requests of a user to the choices, none of which is left there."""
        num_each = max(1, self._window // max(1, len(self._queues)))
        for request in islice(self._queues.offered(user, waiting), num_each):
            if request not in self._num_cached:
                self._num_cached[request] = waiting.num_cached_tokens(request)
            heappush(self._choices, (-self._num_cached[request], request.arrival, request))
            self._num_choices[user] += 1

    def _best(self, waiting: Waiting) -> Request | None:
        """Return the choice of which most is cached, of users with credit; None if none of them has any."""
        while self._choices:
            request = self._choices[0][-1]
            user = request.params.user
            is_left = request.status is RequestStatus.WAITING and waiting.is_offered(request)
            if is_left and self.credit(user) > 0:
                return request
            choice = heappop(self._choices)
            if is_left:
                self._aside.setdefault(user, []).append(choice)
                continue
            self._num_choices[user] -= 1
            if not self._num_choices[user]:
                self._look_up(user, waiting)
        return None
