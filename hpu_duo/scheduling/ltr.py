"""By a learned ranking of the lengths of outputs."""

from __future__ import annotations

from typing import ClassVar

from hpu_duo.request import Request
from hpu_duo.scheduling.idle import IdleTimes
from hpu_duo.scheduling.ranked import Rank, RankedPolicy


class LearnedToRank(RankedPolicy):
    """Requests of the lowest ``Request.score`` are admitted first, and displace those of higher ones.

    A score is given once, at arrival, by a model that was trained to put outputs in order of their lengths.
    Only the order of scores matters. Scores that are all equal give first come, first served, and lengths as
    scores give the shortest job first.

    A request that has waited for ``idle`` steps goes before all that have not, and stays before them until it
    has run for ``period`` steps.

    Args:
        idle, period: steps.

    Source: Fu et al. 2024, Efficient LLM Scheduling by Learning to Rank (arXiv:2408.15792).
    """

    displaces: ClassVar[bool] = True
    needs_scores = True

    def __init__(self, idle: float = 1000.0, period: int = 100) -> None:
        super().__init__()
        for name, value in (("idle", idle), ("period", period)):
            if not value >= 1:
                raise ValueError(f"expected {name} of scheduling_policy 'ltr' to be 1 or more, got {value}")
        self._idle, self._period = idle, period
        self._times = IdleTimes()
        # Steps that each promoted request has left.
        self._promoted: dict[Request, int] = {}

    def rank(self, request: Request) -> Rank:
        """Return whether the request is promoted, and its score."""
        return (0.0 if request in self._promoted else 1.0, request.score)

    def begin_step(self) -> None:
        """Promote those who have waited for long."""
        self._times.step += 1
        for request in self._times.take_idle(self._idle):
            self._promoted[request] = self._period
            self.rerank(request)

    def queued(self, request: Request) -> None:
        """Begin to count steps."""
        super().queued(request)
        self._times.begin(request)

    def admitted(self, request: Request) -> None:
        """Count no steps while the request runs."""
        super().admitted(request)
        self._times.end(request)

    def charge(self, request: Request, num_computed: int, num_sampled: int) -> None:
        """Count the steps that a promoted request runs."""
        if request in self._promoted:
            self._promoted[request] -= 1
            if not self._promoted[request]:
                del self._promoted[request]

    def ended(self, request: Request) -> None:
        """Forget the request."""
        super().ended(request)
        self._times.end(request)
        self._promoted.pop(request, None)
