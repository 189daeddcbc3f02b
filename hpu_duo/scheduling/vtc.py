"""The virtual token counter: users get the same service, whoever asks for more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpu_duo.request import Request
from hpu_duo.scheduling.policy import LeastFirst, SchedulingPolicy, User, UserQueues, Waiting, read_weights
from hpu_duo.scheduling.ranked import LENGTHS, OutputLengths, make_lengths

_MOST_IDLE = 1024
"""Counters that are kept anyway; of more, those are forgotten that say nothing."""


class VirtualTokenCounter(SchedulingPolicy):
    """Admits the earliest request of the user who has had the least, and counts what each user has.

    A user pays for the prompt when a request is first admitted, and for each token of the output. Tokens that
    the prefix cache has are paid for like others; see ``dlpm``. A user who comes back is lifted to the least
    of those who wait, and if nobody waits, to what the user has paid by now who was the last to wait. So
    nobody saves up service by not asking.

    The service of two users who both always have a request waiting differs by ``2 * max(input_price * longest
    prompt, output_price * tokens that run at a time)`` at most, prompts and outputs together, if nobody is
    preempted or passed over and their weights are 1.

    When blocks run out, the latest request of the user who has had the most is preempted. It is not paid for
    again.

    Args:
        input_price, output_price: of a token.
        lengths: with "stated" or "recent" (see ``sjf``) the expected output is paid for in advance, and the
            difference when it is known; "none" pays for tokens as they come.
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
        """Lift the counter of a user who comes back."""
        user = request.params.user
        self._unfinished.add(request)
        is_new = request.admitted_at is None
        if is_new:
            self._new.add(request)
        comes_back = self._queues.add(request)
        if comes_back and is_new:
            floor = self._waiting.least_number if self._waiting else self.counter(self._last_to_leave)
            self._counters[user] = max(self.counter(user), floor)
        # Even of a user who waits: there may be somebody to choose again.
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
        """Pay back what was expected and did not come."""
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
        """Take a request from the queue, if it is there."""
        self._new.discard(request)
        user = request.params.user
        if self._queues.discard(request):
            self._waiting.discard(user)
            self._last_to_leave = user

    def _forget_idle(self) -> None:
        """Forget counters that no user can be told by: whoever comes back would be lifted beyond them."""
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
    """Refuse prices below 0, and infinite ones.

    Raises:
        ValueError: one is not in the range.
    """
    for name, price in (("input_price", input_price), ("output_price", output_price)):
        if not 0 <= price < float("inf"):
            raise ValueError(f"expected {name} to be a number of 0 or more, got {price}")
