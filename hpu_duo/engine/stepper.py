"""The step loop: plan, run, commit, output."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from graphs import GraphMissError, RecompileError
from graphs.interrupts import Deferral
from hpu_duo.device.ranks import RankError
from hpu_duo.engine.outputs import OutputQueue, TokenLogprob, logprobs_of
from hpu_duo.engine.runner import Runner, StepResult
from hpu_duo.engine.samples import LiveSamples
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.step_plan import CommittedToken, StepPlan
from hpu_duo.engine.telemetry import Replanning, ShapeWatch, Telemetry
from hpu_duo.request import FinishReason, Request
from hpu_duo.sampling import SamplingRow

_MOST_FAILURES = 2
"""Number of failed steps with a request after which it runs alone."""


class FailureIsolation:
    """Isolates the request that makes steps fail: requests of failed steps run alone, one after the other.

    A request is suspect after two failed steps without a token between them. A step that fits no bucket would
    be planned again in the same shape, so its requests are suspect at once.

    Only unfinished requests are stored.

    Attributes:
        last_failed: requests of the last step, if it failed.
    """

    def __init__(self) -> None:
        self.last_failed: tuple[Request, ...] = ()
        self._num_failures: dict[Request, int] = {}
        self._queue: deque[Request] = deque()

    @property
    def alone(self) -> Request | None:
        """The request to run alone in the next step; None if all may run."""
        return self._queue[0] if self._queue else None

    def culprit(self, plan: StepPlan, error: Exception) -> Request | None:
        """Return the request that made a step fail; None if it is not known yet."""
        requests = self.last_failed = tuple(row.request for row in plan.rows)
        is_miss = isinstance(error, GraphMissError)
        if requests == (self.alone,):
            return requests[0]
        for request in requests:
            self._num_failures[request] = self._num_failures.get(request, 0) + 1
        self._queue.extend(r for r in requests if is_miss or self._num_failures[r] >= _MOST_FAILURES)
        return None

    def forget(self, request: Request) -> None:
        """Remove an ended request."""
        self.last_failed = tuple(each for each in self.last_failed if each is not request)
        self._num_failures.pop(request, None)
        if request in self._queue:
            self._queue.remove(request)

    def clear(self, plan: StepPlan) -> None:
        """Record a step that succeeded: requests with a new token are no longer suspect."""
        if not self._num_failures:
            return
        alone = self.alone
        for row in plan.sampled_rows:
            self._num_failures.pop(row.request, None)
            if row.request is alone:
                self._queue.popleft()


class Stepper:
    """Runs steps, one at a time.

    All methods are called with interrupts deferred, by one thread at a time.

    Attributes:
        samples: the samples that have not ended.
        output_queue: receives the outputs.
        telemetry: recorders of steps and their shapes.

    Args:
        runner: the device side.
        scheduler: plans the steps.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.samples, self.output_queue = LiveSamples(), OutputQueue()
        replanning = Replanning(runner.model.model.name_or_path or "DIR", scheduler.limits)
        self.telemetry = Telemetry(ShapeWatch(lambda: runner.graphs.table, replanning))
        self._runner, self._scheduler = runner, scheduler
        self._isolation = FailureIsolation()
        self._uncollected: deque[tuple[CommittedToken, TokenLogprob | None]] = deque()
        self._is_stepping = False
        self._aborted_meanwhile: list[str] = []

    @property
    def has_uncollected(self) -> bool:
        """Whether sampled tokens are not in any output yet."""
        return bool(self._uncollected)

    @property
    def last_failed(self) -> list[str]:
        """Ids of unfinished requests that had a row in the last step, if it failed."""
        states = (self.samples.get(request.request_id) for request in self._isolation.last_failed)
        return [state.public_id for state in states if state is not None]

    def abort(self, request_id: str) -> bool:
        """End all samples of a request; False if no unfinished request has this id.

        Called from within a step, such as by a host sampler, it ends the request after the step.
        """
        states = self.samples.of(request_id)
        if self._is_stepping:
            self._aborted_meanwhile.append(request_id)
            return bool(states)
        # The plan of a failed step has references to requests, and is not needed any more.
        self._scheduler.discard()
        for state in states:
            self._end(state.request, FinishReason.ABORT)
            self.output_queue.report(state.abort())
        return bool(states)

    def check_between_steps(self) -> None:
        """Raise RuntimeError if the caller, such as a host sampler, runs within a step."""
        if self._is_stepping:
            raise RuntimeError("expected no step to be run from within another step")

    def advance(self, deferral: Deferral) -> None:
        """Run one step, and queue its outputs.

        Args:
            deferral: deferral of interrupts, which is lifted while the device runs.

        Raises:
            RuntimeError: the caller runs within a step.
        """
        if self._is_stepping:
            self.check_between_steps()
        self._is_stepping = True
        try:
            self._advance(deferral)
        finally:
            self._is_stepping = False
            while self._aborted_meanwhile:
                self.abort(self._aborted_meanwhile.pop())

    def _advance(self, deferral: Deferral) -> None:
        self._isolation.last_failed = ()
        began = time.perf_counter()
        # Tokens that a failed step sampled, and its plan if it was not committed.
        if self._uncollected:
            self._collect()
        self._scheduler.discard()
        plan = self._scheduler.plan(self._isolation.alone)
        if plan is None:
            return
        sampling, errors = self._sampling_rows(plan)
        planned = time.perf_counter()
        try:
            with deferral.lifted():
                result = self._runner.run(plan, sampling)
        except (RecompileError, RankError):
            raise  # caused by no request
        except Exception as error:
            culprit = self._isolation.culprit(plan, error)
            if culprit is None:
                raise
            self._fail(culprit, error)
            return
        ran = time.perf_counter()
        self._isolation.clear(plan)
        self._take(plan, result, {**errors, **result.errors})
        self._collect()
        self.telemetry.counters.host_s += time.perf_counter() - began - (ran - planned) + result.build_s
        self.telemetry.counters.device_s += ran - planned - result.build_s

    def _sampling_rows(
        self, plan: StepPlan
    ) -> tuple[dict[int, tuple[SamplingRow, ...]], dict[int, Exception]]:
        """Return the sampling parameters of each token by ring row, and the errors of rows without them."""
        rows, errors = dict[int, tuple[SamplingRow, ...]](), dict[int, Exception]()
        for row in plan.sampled_rows:
            try:
                state = self.samples[row.request.request_id]
                rows[row.ring_row] = tuple(map(state.sampling_row, range(row.num_samples)))
            except Exception as error:
                errors[row.ring_row] = error
        return rows, errors

    def _take(self, plan: StepPlan, result: StepResult, errors: Mapping[int, Exception]) -> None:
        """Commit a completed step; its tokens are output by ``_collect``.

        Args:
            errors: errors by ring row; these requests end.
        """
        logprobs = {} if result.logprobs is None else logprobs_of(plan, result.token_ids, result.logprobs)
        self.telemetry.note(plan, result, self._scheduler.allocations, self._runner.executor.store.plan)
        for row in plan.sampled_rows:
            if row.ring_row in errors:
                self._fail(row.request, errors[row.ring_row])
        for committed in self._scheduler.commit(plan, result.token_ids):
            self._uncollected.append((committed, logprobs.get(committed.sample)))

    def _collect(self) -> None:
        """Turn sampled tokens into outputs, one by one, so that an interrupt loses no other token."""
        while self._uncollected:
            committed, logprob = self._uncollected.popleft()
            request = committed.request
            state = self.samples.get(request.request_id)
            if state is None:
                continue  # aborted before its token was collected
            try:
                output = state.take(committed, logprob)
            except Exception as error:
                self._fail(request, error)
                continue
            if output.finish_reason is not None:
                self._end(request, output.finish_reason)
            self.output_queue.report(output)

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request with an error, unless it has ended."""
        state = self.samples.get(request.request_id)
        if state is not None:
            self._end(request, FinishReason.ERROR)
            self.output_queue.report(state.fail(error))

    def _end(self, request: Request, reason: FinishReason) -> None:
        if not request.is_finished:
            self._scheduler.finish(request, reason)
        self._isolation.forget(request)
        self.samples.remove(request.request_id)
