"""The replica with the fewest requests."""

from __future__ import annotations

from collections.abc import Sequence

from hpu_duo.routing.request import RoutedRequest
from hpu_duo.routing.round_robin import RoundRobin


class LeastLoaded(RoundRobin):
    """Sends each request to where the fewest are open; of those, the fewest prompt tokens; then by turns."""

    def _pick(self, request: RoutedRequest, offered: Sequence[str], now: float) -> str:
        return min(
            offered, key=lambda each: (self.num_open(each), self.num_open_tokens(each), self._turns[each])
        )
