"""Policies that rank each request: by arrival, by priority, by length, by a learned ranking."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, log2
from typing import ClassVar

from hpu_duo.request import Request
from hpu_duo.scheduling.policy import IdleTimes, SchedulingPolicy, SortedQueue, Waiting

Rank = tuple[float, ...]


class RankedOrder(SortedQueue[Request, tuple[Rank, int]]):
    """Requests sorted by rank, then by arrival; ranks are fixed when added."""

    def add(self, request: Request, rank: Rank) -> None:
        """Insert a request.

        Raises:
            ValueError: it is in here.
        """
        if request in self:
            raise ValueError(f"{request} is ranked already")
        self.put(request, (rank, request.arrival))


class RankedPolicy(SchedulingPolicy):
    """Admits the lowest rank, and preempts the highest; ties go by arrival.

    Waiting requests are sorted by rank, so choosing does not depend on their number.

    Later arrivals overtake the earliest waiting request ``patience`` times at most; then it is next, and is
    not displaced any more. While it is passed over, others go by arrival. So a request with ``k`` earlier
    arrivals waits for at most ``(k + 1) * patience`` admissions of later ones, if none is skipped.

    Args:
        patience: infinite = requests of a high rank may wait for ever.
    """

    def __init__(self, patience: float = inf) -> None:
        if not patience >= 0:
            raise ValueError(f"expected patience to be 0 or more, got {patience}")
        self._patience = patience
        self._order = RankedOrder()
        self._overtaken: set[Request] = set()

    @abstractmethod
    def rank(self, request: Request) -> Rank:
        """Return the rank of a request; it may change while the request runs, or by ``rerank``."""

    def rerank(self, request: Request) -> None:
        """Update the rank of a request, if it waits."""
        if request in self._order:
            self._order.put(request, (self.rank(request), request.arrival))

    def next(self, waiting: Waiting) -> Request:
        """Return the lowest rank, or the earliest arrival if the first one was overtaken too often."""
        if waiting.num_overtakes >= self._patience:
            first = waiting.first
            if first is waiting.arrivals.first:  # else it is another one that was overtaken, and passed over
                self._overtaken.add(first)
            return first
        return next(self._order.accepted(waiting.is_offered, waiting.step))

    def victim(self, running: Sequence[Request]) -> Request:
        """Return the highest rank."""
        return max(running, key=self._place)

    def displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Return the highest rank, if it is higher than that of the request."""
        if not self.displaces:
            return None
        others = [other for other in running if other not in self._overtaken]
        worst = max(others, key=self._place, default=None)
        return worst if worst is not None and self.rank(worst) > self.rank(request) else None

    def queued(self, request: Request) -> None:
        """Sort the request in."""
        self._order.add(request, self.rank(request))

    def admitted(self, request: Request) -> None:
        """Remove the request."""
        self._order.discard(request)

    def ended(self, request: Request) -> None:
        """Forget the request."""
        self._order.discard(request)
        self._overtaken.discard(request)

    def _place(self, request: Request) -> tuple[Rank, int]:
        return self.rank(request), request.arrival


class ArrivalRank(RankedPolicy):
    """First come, first served: all have the same rank."""

    def rank(self, request: Request) -> Rank:
        """Return the same rank for all requests."""
        return ()


class FirstComeFirstServed(SchedulingPolicy):
    """Requests are admitted in order of arrival, and the latest one is preempted first.

    A waiting request never overtakes an earlier one, so none waits for later arrivals.
    """

    name = "fcfs"

    def next(self, waiting: Waiting) -> Request:
        """Return the earliest arrival."""
        return waiting.first


class PriorityFirst(RankedPolicy):
    """Requests are admitted by ``SamplingParams.priority``, lower values first, then by arrival.

    When blocks run out, the one of the highest value is preempted, the latest of them first. A waiting
    request does not displace a running one. This is what vLLM's policy of the same name does. Requests wait
    for as long as more urgent ones arrive, unless ``patience`` is set.

    Args:
        patience: see ``RankedPolicy``.
    """

    honours_priority = True

    def rank(self, request: Request) -> Rank:
        """Return the priority."""
        return (request.params.priority,)


class LearnedToRank(RankedPolicy):
    """Requests of the lowest ``Request.score`` are admitted first, and displace those of higher ones.

    A score is computed once, at arrival, by a model that was trained to order outputs by length. Only the
    order of scores matters. Equal scores result in first come, first served, and lengths as scores in
    shortest job first.

    A request that has waited for ``idle`` steps precedes all that have not, until it has run for ``period``
    steps.

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


class OutputLengths(ABC):
    """An estimate of output lengths, constant for each request."""

    def __init__(self) -> None:
        self._estimates: dict[Request, float] = {}

    def of(self, request: Request) -> float:
        """Return the estimate for an unfinished request."""
        if request not in self._estimates:
            self._estimates[request] = self._estimate(request)
        return self._estimates[request]

    def ended(self, request: Request) -> None:
        """Update the estimates by an ended request, and remove it."""
        self._estimates.pop(request, None)

    @abstractmethod
    def _estimate(self, request: Request) -> float: ...


class StatedLengths(OutputLengths):
    """``SamplingParams.expected_tokens``, else the most tokens that the request may sample.

    Exact for requests that state their length, or end at ``max_tokens``.
    """

    def _estimate(self, request: Request) -> float:
        return stated_length(request)


class RecentLengths(OutputLengths):
    """The mean of a user's last outputs; before the first one, that of all users, else the stated length.

    Args:
        num_outputs: number of outputs of a user in the mean.
    """

    def __init__(self, num_outputs: int = 5) -> None:
        super().__init__()
        self._num_outputs = num_outputs
        self._recent: dict[str | None, deque[int]] = {}
        self._of_all: deque[int] = deque(maxlen=_MOST_REMEMBERED)

    def _estimate(self, request: Request) -> float:
        recent = self._recent.get(request.params.user) or self._of_all
        return sum(recent) / len(recent) if recent else stated_length(request)

    def ended(self, request: Request) -> None:
        """Remember the length of an output, unless the request never ran."""
        super().ended(request)
        if request.num_output_tokens == 0:
            return
        # Least recently active users first, which are dropped when there are many.
        outputs = self._recent.pop(request.params.user, deque(maxlen=self._num_outputs))
        outputs.append(request.num_output_tokens)
        self._recent[request.params.user] = outputs
        self._of_all.append(request.num_output_tokens)
        if len(self._recent) > _MOST_USERS:
            del self._recent[next(iter(self._recent))]


_MOST_REMEMBERED, _MOST_USERS = 256, 65_536


def stated_length(request: Request) -> float:
    """Return the output tokens that a request is expected to have by its own word."""
    most = len(request.tokens) - request.num_prompt_tokens
    expected = request.params.expected_tokens
    return most if expected is None else min(expected, most)


LENGTHS = {"stated": StatedLengths, "recent": RecentLengths}
"""Sources of lengths by name."""


def make_lengths(name: str) -> OutputLengths:
    """Create the source of lengths of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in LENGTHS:
        raise ValueError(f"expected lengths to be one of {', '.join(LENGTHS)}, got {name!r}")
    return LENGTHS[name]()


PATIENCE = 64.0
"""Times that later arrivals overtake the earliest waiting request under policies that could starve it: it is
then one of every 65 admissions, which costs the others little."""


class ShortestJobFirst(RankedPolicy):
    """Requests with the shortest output are admitted first, and the longest are preempted first.

    Optimal for the mean completion time of requests that arrive together, if lengths are exact and requests
    run one after the other.

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
        """Remove the request, and update the estimates by its length."""
        super().ended(request)
        self._lengths.ended(request)


class ShortestRemainingFirst(ShortestJobFirst):
    """Requests with the fewest remaining output tokens are admitted first, and displace those with more.

    A displaced request is recomputed later, except for cached tokens.
    """

    displaces: ClassVar[bool] = True

    def rank(self, request: Request) -> Rank:
        """Return the remaining output tokens; 0 beyond the expected number."""
        return (max(0.0, self._lengths.of(request) - request.num_output_tokens),)


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
    """Requests begin on the level that fits their prompt, and descend whenever they use up its quantum.

    Needs no lengths: short requests end on the upper levels, before long ones continue. Service is counted in
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
        """Promote requests that have waited for long, at the end of each period."""
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
        """Stop counting waiting steps; cached tokens are not charged."""
        super().admitted(request)
        self._times.end(request)
        feedback = self._of(request)
        feedback.num_paid = max(feedback.num_paid, request.num_computed_tokens)

    def charge(self, request: Request, num_computed: int, num_sampled: int) -> None:
        """Charge the service, and demote the request when its quantum is used up."""
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
