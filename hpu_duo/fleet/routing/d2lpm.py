"""Distributed deficit longest prefix match: prefixes, as far as a client has credit at a replica."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, inf

from hpu_duo.fleet.routing.prefix_router import CAPACITY, MIN_CACHED, PrefixRouter, longest
from hpu_duo.fleet.routing.router import Dispatch, RoutedRequest

_MOST_DEBTORS = 1000
"""Most users without requests with remembered debts, the latest ones."""


class D2LPM(PrefixRouter):
    """Sends a request to a replica with its prefix at which its user has credit, else to any.

    Of several, the one with the shortest queue is chosen.

    A user is charged at a replica for computed prompt tokens, when they are sent, and for output tokens, at
    the end, when the estimate of cached tokens is corrected too. A user without credit at any replica gets
    ``quantum`` at all of them, repeatedly if needed. So a user is let follow a prefix past shorter queues for
    ``quantum`` at most before the other replicas have had as much. Replicas run ``dlpm``
    (docs/scheduling.md), to which it reduces with one replica.

    The charge of a failed request is refunded. A user without requests retains debts, but no credit.

    Args:
        quantum: credit per round, above 0.
        input_price, output_price: of a token.
        capacity: assumed units (tokens, or characters) of a replica's cache.
        min_cached: tokens of a prefix below which it counts as not cached.

    Source: Cao et al. 2025 (arXiv:2501.14312). The source does not state when credit is given, and what
    happens to users who leave.
    """

    def __init__(
        self,
        quantum: float = 4096.0,
        input_price: float = 1.0,
        output_price: float = 2.0,
        capacity: float = CAPACITY,
        min_cached: float = MIN_CACHED,
    ) -> None:
        if not quantum > 0:
            raise ValueError(f"expected quantum to be above 0, got {quantum}")
        if not (0 <= input_price < inf and 0 <= output_price < inf):
            raise ValueError(f"expected prices of 0 or more, got {input_price} and {output_price}")
        super().__init__(capacity, min_cached)
        self._quantum, self._input_price, self._output_price = quantum, input_price, output_price
        self._credits: dict[str, dict[str | None, float]] = {}  # by replica, so that one leaves at once
        self._num_unfinished: dict[str | None, int] = {}
        self._idle_users: dict[str | None, None] = {}  # with entries in _credits, the earliest first

    def credit(self, user: str | None, replica: str) -> float:
        """Return the credit of a user at a replica; debts are negative."""
        return self._credits.get(replica, {}).get(user, 0.0)

    def _pick(self, request: RoutedRequest, offered: Sequence[str], now: float) -> str:
        self._refill(request.user, offered)
        _, holders = longest(self.held(request), offered)
        open_to_user = [each for each in holders if self.credit(request.user, each) > 0]
        return self._shortest_queue(open_to_user or offered)

    def _refill(self, user: str | None, offered: Sequence[str]) -> None:
        """Give a user without credit at the offered replicas enough of it at one."""
        most = max(self.credit(user, each) for each in offered)
        if most <= 0:
            num = 1 if self._quantum == inf else floor(-most / self._quantum) + 1
            for replica in self.replicas:
                raised = self.credit(user, replica) + num * self._quantum
                self._credits[replica][user] = min(raised, self._quantum)
            if user not in self._num_unfinished:
                self._remember(user)

    def _joins(self, replica: str, now: float) -> None:
        self._credits[replica] = {}

    def _leaves(self, replica: str) -> None:
        super()._leaves(replica)
        del self._credits[replica]

    def _begins(self, sent: Dispatch) -> None:
        super()._begins(sent)
        user = sent.request.user
        self._idle_users.pop(user, None)
        self._num_unfinished[user] = self._num_unfinished.get(user, 0) + 1
        self._pay(sent, self._input_price * sent.num_new_tokens)

    def _ends(self, sent: Dispatch, now: float, num_outputs: int, num_cached_tokens: float | None) -> None:
        super()._ends(sent, now, num_outputs, num_cached_tokens)
        cost = self._output_price * num_outputs
        if num_cached_tokens is not None:
            num_new = sent.request.num_tokens - num_cached_tokens
            cost += self._input_price * (num_new - sent.num_new_tokens)
        self._pay(sent, cost)
        self._settle(sent.request.user)

    def _fails(self, sent: Dispatch, now: float) -> None:
        self._pay(sent, -self._input_price * sent.num_new_tokens)
        self._settle(sent.request.user)

    def _loses(self, sent: Dispatch) -> None:
        self._settle(sent.request.user)

    def _pay(self, sent: Dispatch, cost: float) -> None:
        user, replica = sent.request.user, sent.replica
        self._credits[replica][user] = min(self.credit(user, replica) - cost, self._quantum)

    def _settle(self, user: str | None) -> None:
        """Count the end of a user's request; without requests, only debts are retained."""
        self._num_unfinished[user] -= 1
        if self._num_unfinished[user]:
            return
        del self._num_unfinished[user]
        for credits in self._credits.values():
            if credits.get(user, -1.0) >= 0:
                del credits[user]
        if any(user in credits for credits in self._credits.values()):
            self._remember(user)

    def _remember(self, user: str | None) -> None:
        """Note that a user without requests has entries; if too many have, the earliest one's are dropped."""
        self._idle_users.pop(user, None)
        self._idle_users[user] = None
        if len(self._idle_users) > _MOST_DEBTORS:
            earliest = next(iter(self._idle_users))
            del self._idle_users[earliest]
            for credits in self._credits.values():
                credits.pop(earliest, None)
