"""An engine whose device is a cost function: the real scheduler, without tensors or a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphs import BatchShape, BucketTable, GraphMissError, Miss
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.step_plan import CommittedToken, StepPlan
from hpu_duo.request import Request
from hpu_duo.simulate.step_shapes import StepShapes


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


class SimulatedEngine:
    """Serves its requests step by step and keeps no time: a clock says when a step starts.

    Every sampled token is the one that its request forces, or 0, so the length of a request follows from its
    parameters (``max_tokens`` with ``ignore_eos``).

    Args:
        scheduler: plans the steps, as for an engine; trims prompts if it was made with ``ChunkTrimming``.
            It must not be used otherwise.
        duration_of: duration of a step in a bucket, above 0, in the units of the clock.
        table: buckets that steps are padded to; None runs each at its exact shape.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        duration_of: Callable[[BatchShape], float],
        table: BucketTable | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._duration_of, self._table = duration_of, table
        self._shapes = StepShapes(scheduler.limits.block_size)
        self._shape: BatchShape | None = None
        self._bucket: BatchShape | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether it has a request to serve."""
        return self.scheduler.has_unfinished

    def add(self, request: Request) -> None:
        """Queue a request for the next step; ValueError if the pool cannot hold it."""
        self.scheduler.add(request)

    def step(self, start: float) -> SimulatedStep:
        """Serve one step that starts at a time; there must be an unfinished request.

        Raises:
            ValueError: the bucket takes no time.
            GraphMissError: no bucket holds the step.
        """
        plan = self.scheduler.plan()
        assert plan is not None, "somebody is unfinished"
        shape = self._shapes.of(plan)
        if self._bucket is None or shape is not self._shape:
            self._shape, self._bucket = shape, self._bucket_of(shape)
        bucket = self._bucket
        duration = self._duration_of(bucket)
        if not duration > 0:
            raise ValueError(f"expected a duration above 0 for {bucket}, got {duration}")
        committed = tuple(self.scheduler.commit(plan, _tokens_of(plan)))
        return SimulatedStep(start, duration, plan, shape, bucket, committed)

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
        int(row.request.tokens[place]) if row.request.params.forced_token_ids else 0
        for row in plan.sampled_rows
        for place in range(row.end - row.num_samples + 1, row.end + 1)
    ]
