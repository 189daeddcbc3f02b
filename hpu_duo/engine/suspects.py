"""Find the request that makes steps fail."""

from __future__ import annotations

from collections import deque

from graphs import GraphMissError
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.request import Request

_MOST_FAILURES = 2
"""Failing steps that a request may have a row in before it is tried alone."""


class Suspects:
    """Requests of failing steps, to be run alone one after the other: the one that fails alone is at fault.

    A request is suspect after two failing steps without a token between them. A step that no bucket holds
    would be planned again in the same shape, so its requests are suspect at once.

    Only requests that have not ended are kept.

    Attributes:
        last_failed: requests of the last step, if it has failed.
    """

    def __init__(self) -> None:
        self.last_failed: tuple[Request, ...] = ()
        self._num_failures: dict[Request, int] = {}
        self._queue: deque[Request] = deque()

    @property
    def alone(self) -> Request | None:
        """The request that the next step is to run alone; None when all may run."""
        return self._queue[0] if self._queue else None

    def culprit(self, plan: StepPlan, error: Exception) -> Request | None:
        """The request that is at fault for a step that failed; None if that is not known yet."""
        requests = self.last_failed = tuple(row.request for row in plan.rows)
        is_miss = isinstance(error, GraphMissError)
        if requests == (self.alone,):
            return requests[0]
        for request in requests:
            self._num_failures[request] = self._num_failures.get(request, 0) + 1
        self._queue.extend(r for r in requests if is_miss or self._num_failures[r] >= _MOST_FAILURES)
        return None

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""
        self.last_failed = tuple(each for each in self.last_failed if each is not request)
        self._num_failures.pop(request, None)
        if request in self._queue:
            self._queue.remove(request)

    def clear(self, plan: StepPlan) -> None:
        """Note that a step has not failed: requests that it gave a token are no longer suspect."""
        if not self._num_failures:
            return
        alone = self.alone
        for row in plan.sampled_rows:
            self._num_failures.pop(row.request, None)
            if row.request is alone:
                self._queue.popleft()
