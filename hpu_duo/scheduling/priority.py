"""By the priority that requests come with."""

from __future__ import annotations

from hpu_duo.request import Request
from hpu_duo.scheduling.ranked import Rank, RankedPolicy


class PriorityFirst(RankedPolicy):
    """Requests are admitted by ``SamplingParams.priority``, lower values first, then by arrival.

    When blocks run out, the one of the highest value is preempted, the latest of them first. A waiting
    request does not displace a running one. This is what vLLM's policy of the same name does. Requests wait
    for as long as more urgent ones come, unless ``patience`` is given.

    Args:
        patience: see ``RankedPolicy``.
    """

    honours_priority = True

    def rank(self, request: Request) -> Rank:
        """Return the priority."""
        return (request.params.priority,)
