"""Fair shares: virtual token counters, and deficit longest prefix match, which builds on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice
from math import floor, inf

from hpu_duo.request import Request, RequestStatus
from hpu_duo.scheduling.cache_aware import WINDOW
from hpu_duo.scheduling.policy import LeastFirst, SchedulingPolicy, User, UserQueues, Waiting, read_weights
from hpu_duo.scheduling.ranked import LENGTHS, PATIENCE, OutputLengths, make_lengths

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
