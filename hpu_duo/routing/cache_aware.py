"""The replica with the longest prefix, while queues are about even."""

from __future__ import annotations

from collections.abc import Sequence

from hpu_duo.routing.prefix_router import CAPACITY, MIN_CACHED, PrefixRouter, longest
from hpu_duo.routing.request import RoutedRequest


class CacheAware(PrefixRouter):
    """Sends a request to where most of it is cached, unless that is too little or queues are too uneven.

    Args:
        threshold: share of a prompt that has to be cached; below it, the request goes where least is cached.
        uneven_by, uneven_times: queues are uneven when the longest has more than ``uneven_by`` requests more
            than the shortest, and more than ``uneven_times`` as many; then the shortest queue is taken.
        idle_by: they are uneven as well when a replica has none and the longest has more than so many.
        capacity: units (tokens, or characters) that a replica is taken to cache.
        min_cached: tokens of a prefix below which it counts as not cached.

    Source: the policy ``cache_aware`` of the routers of SGLang and vLLM, with their defaults. ``idle_by`` is
    not theirs: infinite turns it off.
    """

    def __init__(
        self,
        threshold: float = 0.3,
        uneven_by: float = 64.0,
        uneven_times: float = 1.5,
        idle_by: float = 4.0,
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

    def _pick(self, request: RoutedRequest, offered: Sequence[str], now: float) -> str:
        queues = [self.num_open(each) for each in offered]
        least, most = min(queues), max(queues)
        is_uneven = most - least > (self._uneven_by if least else min(self._uneven_by, self._idle_by))
        if is_uneven and most > self._uneven_times * least:
            return self._shortest_queue(offered)
        num, holders = longest(self.held(request), offered)
        if holders and num > self._threshold * len(request.units):
            return self._shortest_queue(holders)
        return min(offered, key=lambda each: (self.prefixes.size(each), self.num_open(each)))
