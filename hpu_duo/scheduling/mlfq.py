"""Levels of feedback: who has had much goes behind those who have had little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import ClassVar

from hpu_duo.request import Request
from hpu_duo.scheduling.policy import IdleTimes
from hpu_duo.scheduling.ranked import (
    ArrivalRank,
    LearnedToRank,
    PriorityFirst,
    Rank,
    RankedPolicy,
    ShortestJobFirst,
    ShortestRemainingFirst,
)

INNER_POLICIES: dict[str, Callable[[], RankedPolicy]] = {
    "fcfs": ArrivalRank,
    "priority": PriorityFirst,
    "sjf": ShortestJobFirst,
    "srtf": ShortestRemainingFirst,
    "ltr": LearnedToRank,
}
"""Orders within a level by name: those that follow from a rank of each request."""


@dataclass
class _Feedback:
    """Level of a request, service on it, and how many of its tokens were paid for."""

    level: int
    service: int = 0
    num_paid: int = 0


class MultiLevelFeedback(RankedPolicy):
    """Requests begin on the level that holds their prompt, and go down one whenever they use up its quantum.

    Needs no lengths: short requests end on the upper levels, before long ones go on. Service is counted in
    tokens, computed and sampled, those computed again left out; level ``p`` grants ``quantum * 2**p``. A
    request of an upper level displaces one of a lower level, and none of its own.

    A request that has waited for ``idle`` steps is back on the first level ``period`` steps later at most.
    Only requests that the policy of this level prefers go before it then, earlier arrivals by default.

    Args:
        quantum: service of the first level, 1 or more.
        idle, period: steps.
        inner: the policy within each level, a name of ``INNER_POLICIES`` with its default options; several
            with slashes between them are those of the first levels, the last one that of all further levels.

    Source: FastServe's skip-join queues, Wu et al. 2023 (arXiv:2305.05920), in tokens instead of seconds.
    """

    displaces: ClassVar[bool] = True

    def __init__(
        self, quantum: int = 256, idle: float = 1000.0, period: int = 100, inner: str = "fcfs"
    ) -> None:
        super().__init__()
        for name, value in (("quantum", quantum), ("idle", idle), ("period", period)):
            if not value >= 1:
                raise ValueError(f"expected {name} of scheduling_policy 'mlfq' to be 1 or more, got {value}")
        names = inner.split("/")
        if not set(names) <= set(INNER_POLICIES):
            raise ValueError(
                f"expected inner of scheduling_policy 'mlfq' to be one of {', '.join(INNER_POLICIES)}, or "
                f"several with / between them, got {inner!r}"
            )
        self._inner = [INNER_POLICIES[name]() for name in names]
        self.honours_priority = any(each.honours_priority for each in self._inner)
        self.needs_scores = any(each.needs_scores for each in self._inner)
        self._quantum, self._idle, self._period = quantum, idle, period
        self._feedback: dict[Request, _Feedback] = {}
        self._times = IdleTimes()

    def level(self, request: Request) -> int:
        """Return the level of an unfinished request, 0 for the first."""
        return self._of(request).level

    def rank(self, request: Request) -> Rank:
        """Return the level, and the rank within it."""
        level = self.level(request)
        return (level, *self._inner[min(level, len(self._inner) - 1)].rank(request))

    def displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Return the last one of the lowest level, if that is below the level of the request."""
        last = super().displaced(request, running)
        return last if last is not None and self.level(last) > self.level(request) else None

    def begin_step(self) -> None:
        """Bring back those who have waited for long, at the end of each period."""
        self._times.step += 1
        if self._times.step % self._period == 0:
            for request in self._times.take_idle(self._idle):
                feedback = self._of(request)
                feedback.level = feedback.service = 0
                self.rerank(request)

    def queued(self, request: Request) -> None:
        """Begin to count steps."""
        super().queued(request)
        self._times.begin(request)

    def admitted(self, request: Request) -> None:
        """Count no steps while the request runs; tokens that it took up from the cache are not paid for."""
        super().admitted(request)
        self._times.end(request)
        feedback = self._of(request)
        feedback.num_paid = max(feedback.num_paid, request.num_computed_tokens)

    def charge(self, request: Request, num_computed: int, num_sampled: int) -> None:
        """Count the service, and take the request down when its quantum is used up."""
        feedback = self._of(request)
        num_new = max(0, request.num_computed_tokens - feedback.num_paid)
        feedback.num_paid += num_new
        feedback.service += num_new + num_sampled
        if feedback.service >= self._quantum << feedback.level:
            feedback.level, feedback.service = feedback.level + 1, 0

    def ended(self, request: Request) -> None:
        """Forget the request."""
        super().ended(request)
        for policy in self._inner:
            policy.ended(request)
        self._times.end(request)
        self._feedback.pop(request, None)

    def _of(self, request: Request) -> _Feedback:
        if request not in self._feedback:
            quanta = (request.num_prompt_tokens + 1) / self._quantum
            self._feedback[request] = _Feedback(max(0, ceil(log2(quanta))))
        return self._feedback[request]
