"""Routers that send requests to where their prefixes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, inf

from hpu_duo.fleet.routing.prefix_map import PrefixMap
from hpu_duo.fleet.routing.router import Dispatch, RoutedRequest, Router

CAPACITY = 4e6
"""Default capacity of a replica's cache in units: about a million tokens of text, 16 MB of the map."""

MIN_CACHED = 256
"""Fewest tokens of a relevant prefix: two blocks of 128 tokens.

Replicas cache whole blocks. Prompts with a common prefix of less than a block, as all chats, share nothing,
and recomputing one block is cheap.
"""


_PATIENCE = 1024
"""Cached tokens for which ``cache-aware`` tolerates one more open request."""

_DELAY = 512
"""Tokens of a prompt that delay others about as long as one open request."""


class PrefixRouter(Router):
    """A router with a map of the assumed prefix caches of replicas.

    A prefix of fewer than ``min_cached`` tokens counts as not cached.

    A response with cached tokens corrects the map: a replica with less than half of the expected ones, by
    more than ``min_cached`` tokens, has evicted the rest, and with it all longer prefixes that were not sent
    again since. Smaller differences are ignored.

    Args:
        capacity: assumed units (tokens, or characters) of a replica's cache.
        min_cached: tokens, see above.
        hits_s: seconds for which uses of prefixes are counted.
    """

    def __init__(
        self, capacity: float = CAPACITY, min_cached: float = MIN_CACHED, hits_s: float = 0.0
    ) -> None:
        if not min_cached >= 0:
            raise ValueError(f"expected min_cached of 0 tokens or more, got {min_cached}")
        super().__init__()
        self.prefixes, self._min_cached = PrefixMap(capacity, hits_s), min_cached

    def num_expected(self, request: RoutedRequest, replica: str) -> int:
        """Return the leading units of a prompt that a replica is expected to have cached."""
        return self.held(request).get(replica, 0)

    def held(self, request: RoutedRequest) -> dict[str, int]:
        """Return the cached leading units of a prompt, by replica with a relevant number."""
        least = self._min_cached / request.tokens_per_unit
        return {replica: num for replica, num in self.prefixes.held(request).items() if num >= least}

    def evicted(self, replica: str, request: RoutedRequest, num_kept: int) -> None:
        """Called when a replica has at most the first ``num_kept`` units of a prompt cached."""
        self.prefixes.keep_only(replica, request, num_kept)

    def _leaves(self, replica: str) -> None:
        self.prefixes.forget(replica)

    def _begins(self, sent: Dispatch) -> None:
        self.prefixes.add(sent.replica, sent.request, sent.at)

    def _ends(self, sent: Dispatch, now: float, num_outputs: int, num_cached_tokens: float | None) -> None:
        if num_cached_tokens is None:
            return
        unit_tokens = sent.request.tokens_per_unit
        num_cached = round(num_cached_tokens / unit_tokens)
        is_much_less = (sent.num_expected - num_cached) * unit_tokens > self._min_cached
        if is_much_less and num_cached < sent.num_expected / 2:
            self.prefixes.keep_only(sent.replica, sent.request, num_cached, before=sent.at)

    def _shortest_queue(self, offered: Sequence[str]) -> str:
        """The replica with the fewest open requests, then tokens of them, then the least cached."""

        def queue(replica: str) -> tuple[int, float, int]:
            return self.num_open(replica), self.num_open_tokens(replica), self.prefixes.size(replica)

        return min(offered, key=queue)


def longest(held: Mapping[str, int], offered: Sequence[str]) -> tuple[int, list[str]]:
    """Return the longest cached prefix of a prompt in units, and the replicas with it."""
    most = max(held.get(each, 0) for each in offered)
    return most, [each for each in offered if most and held.get(each, 0) == most]


class CacheAware(PrefixRouter):
    """Sends a request to the replica with most of it cached, unless that is little or queues are uneven.

    Args:
        threshold: share of a prompt that has to be cached; below it, the request is sent to the replica with
            the smallest cache.
        uneven_by, uneven_times: queues are uneven when the longest has more than ``uneven_by`` requests more
            than the shortest, and more than ``uneven_times`` as many; then the shortest queue is chosen.
        idle_by: open requests of the chosen replica above which an idle one is chosen if most are idle;
            if few are, twice as many, and one more for each 1,024 tokens of the prompt that are cached.
        capacity: assumed units (tokens, or characters) of a replica's cache.
        min_cached: tokens of a prefix below which it counts as not cached.

    Source: the policy ``cache_aware`` of the routers of SGLang and vLLM, with their defaults. ``idle_by`` is
    not theirs: infinite disables it.
    """

    def __init__(
        self,
        threshold: float = 0.3,
        uneven_by: float = 64.0,
        uneven_times: float = 1.5,
        idle_by: float = 8.0,
        capacity: float = CAPACITY,
        min_cached: float = MIN_CACHED,
    ) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"expected a threshold from 0 to 1, got {threshold}")
        if not (uneven_by >= 0 and uneven_times >= 1 and idle_by >= 0):
            raise ValueError(
                "expected uneven_by and idle_by of 0 or more and uneven_times of 1 or more, got "
                f"{uneven_by}, {idle_by} and {uneven_times}"
            )
        super().__init__(capacity, min_cached)
        self._threshold, self._uneven_by, self._uneven_times = threshold, uneven_by, uneven_times
        self._idle_by = idle_by
        self._num_unread: dict[str, float] = {}

    def _pick(self, request: RoutedRequest, offered: Sequence[str], now: float) -> str:
        queues = [self.num_open(each) for each in offered]
        least, most = min(queues), max(queues)
        if most - least > self._uneven_by and most > self._uneven_times * least:
            return self._shortest_queue(offered)
        num, holders = longest(self.held(request), offered)
        if holders and num > self._threshold * len(request.units):
            chosen, num_cached = self._shortest_queue(holders), num * request.tokens_per_unit
        else:
            chosen = min(offered, key=lambda each: (self.prefixes.size(each), self.num_open(each)))
            num_cached = 0.0
        are_most_idle = 2 * queues.count(0) > len(queues)
        tolerated = self._idle_by if are_most_idle else 2 * self._idle_by + num_cached / _PATIENCE
        if not least and self.num_open(chosen) > tolerated:
            return self._shortest_queue(offered)
        return chosen

    def _shortest_queue(self, offered: Sequence[str]) -> str:
        """The same; prompts that are still computed count as open requests besides."""

        def queue(replica: str) -> tuple[float, float, int]:
            num = self.num_open(replica) + self._num_unread[replica] / _DELAY
            return num, self.num_open_tokens(replica), self.prefixes.size(replica)

        return min(offered, key=queue)

    def _joins(self, replica: str, now: float) -> None:
        self._num_unread[replica] = 0.0

    def _leaves(self, replica: str) -> None:
        super()._leaves(replica)
        del self._num_unread[replica]

    def _begins(self, sent: Dispatch) -> None:
        super()._begins(sent)
        self._num_unread[sent.replica] += sent.num_new_tokens

    def _answers(self, sent: Dispatch, now: float) -> None:
        self._has_read(sent)

    def _ends(self, sent: Dispatch, now: float, num_outputs: int, num_cached_tokens: float | None) -> None:
        super()._ends(sent, now, num_outputs, num_cached_tokens)
        if not sent.has_token:
            self._has_read(sent)

    def _fails(self, sent: Dispatch, now: float) -> None:
        if not sent.has_token:
            self._has_read(sent)

    def _has_read(self, sent: Dispatch) -> None:
        left = self._num_unread[sent.replica] - sent.num_new_tokens
        self._num_unread[sent.replica] = left if self.num_open(sent.replica) else 0.0  # rounding


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
