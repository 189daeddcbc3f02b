"""The scheduler of the engine on a virtual clock: requests, leases and shapes without tensors or a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from graphs import BatchShape, BucketTable, GraphMissError, Miss
from hpu_duo.engine.batch import exact_shape
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.step_plan import CommittedToken, StepPlan
from hpu_duo.simulate.arrivals import Arrivals


@dataclass(frozen=True)
class SimulatedStep:
    """One step that was served.

    Attributes:
        start, duration: in the units of the clock.
        plan: rows and copies of the step.
        shape: the exact shape.
        bucket: the shape it was padded to; without a table the exact shape.
        committed: the tokens that it added to requests, each with the reason if it ended its request.
    """

    start: float
    duration: float
    plan: StepPlan
    shape: BatchShape
    bucket: BatchShape
    committed: tuple[CommittedToken, ...]

    @property
    def end(self) -> float:
        """Time at which its tokens are there."""
        return self.start + self.duration


class Simulation:
    """A server whose device is a cost function.

    Steps follow each other without a gap while there is a request. Requests that come during a step are
    planned with the next one. Every sampled token is the one that its request forces, or 0, so the length of
    a request follows from its parameters (``max_tokens`` with ``ignore_eos``). The same arrivals, scheduler
    and costs give the same steps.

    Args:
        scheduler: plans the steps, as for an engine; trims prompts if it was made with ``ChunkTrimming``.
            It must not be used otherwise.
        arrivals: the requests.
        duration_of: duration of a step in a bucket, above 0, in the units of the clock.
        table: buckets that steps are padded to; None runs each at its exact shape.

    Attributes:
        now: time on the clock, from 0 on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        arrivals: Arrivals,
        duration_of: Callable[[BatchShape], float],
        table: BucketTable | None = None,
    ) -> None:
        self.scheduler, self.now = scheduler, 0.0
        self._arrivals, self._duration_of, self._table = arrivals, duration_of, table

    def steps(self, until: float = float("inf")) -> Iterator[SimulatedStep]:
        """Serve steps that begin before ``until``, as long as there are requests or will be.

        Raises:
            ValueError: the pool cannot hold a request, a bucket takes no time.
            GraphMissError: no bucket holds a step.
        """
        while self._wait(until):
            yield self._step()

    def _wait(self, until: float) -> bool:
        """Add the requests that have come, or wait for the next one; returns whether a step is to run."""
        self._add_due()
        while not self.scheduler.has_unfinished:
            coming = self._arrivals.next_time()
            if coming is None or coming >= until:
                return False
            self.now = max(self.now, coming)
            self._add_due()
        return self.now < until

    def _add_due(self) -> None:
        for request in self._arrivals.due(self.now):
            self.scheduler.add(request)

    def _step(self) -> SimulatedStep:
        plan = self.scheduler.plan()
        assert plan is not None, "somebody is unfinished"
        shape = exact_shape(plan, self.scheduler.limits.block_size)
        bucket = self._bucket_of(shape)
        duration = self._duration_of(bucket)
        if not duration > 0:
            raise ValueError(f"expected a duration above 0 for {bucket}, got {duration}")
        committed = tuple(self.scheduler.commit(plan, _tokens_of(plan)))
        step = SimulatedStep(self.now, duration, plan, shape, bucket, committed)
        self.now = step.end
        for done in committed:
            if done.finish_reason is not None:
                self._arrivals.ended(done.request, self.now)
        return step

    def _bucket_of(self, shape: BatchShape) -> BatchShape:
        if self._table is None:
            return shape
        found = self._table.fit(shape)
        if isinstance(found, Miss):
            raise GraphMissError(found)
        return found


def _tokens_of(plan: StepPlan) -> list[int]:
    """Tokens that the step samples: the forced ones of each request, then zeros."""
    return [
        int(row.request.tokens[place])
        for row in plan.sampled_rows
        for place in range(row.end - row.num_samples + 1, row.end + 1)
    ]
