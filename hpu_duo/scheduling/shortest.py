"""Short requests first."""

from __future__ import annotations

from typing import ClassVar

from hpu_duo.request import Request
from hpu_duo.scheduling.lengths import make_lengths
from hpu_duo.scheduling.ranked import Rank, RankedPolicy

PATIENCE = 64.0
"""Times that later arrivals overtake the earliest waiting request under policies that could starve it: it is
then one of every 65 admissions, which costs the others little."""


class ShortestJobFirst(RankedPolicy):
    """Requests with the shortest output are admitted first, and the longest are preempted first.

    Of requests that arrive together, the mean time to the end is the least that any order gives, if lengths
    are exact and requests run one after the other.

    Args:
        lengths: "stated" (``expected_tokens``, else ``max_tokens``) or "recent" (mean of the user's last 5).
        patience: see ``RankedPolicy``.
    """

    def __init__(self, lengths: str = "stated", patience: float = PATIENCE) -> None:
        super().__init__(patience)
        self._lengths = make_lengths(lengths)

    def rank(self, request: Request) -> Rank:
        """Return the length of the output."""
        return (self._lengths.of(request),)

    def ended(self, request: Request) -> None:
        """Forget the request, and learn its length."""
        super().ended(request)
        self._lengths.ended(request)


class ShortestRemainingFirst(ShortestJobFirst):
    """Requests with the fewest output tokens to come are admitted first, and displace those with more.

    A request that is displaced computes its tokens again later, but for those that the prefix cache keeps.
    """

    displaces: ClassVar[bool] = True

    def rank(self, request: Request) -> Rank:
        """Return the output tokens to come; 0 for more than were expected."""
        return (max(0.0, self._lengths.of(request) - request.num_output_tokens),)
