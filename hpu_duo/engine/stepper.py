"""The step loop: plan, run, commit, output."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from graphs import BatchShape, BucketTable, GraphCache, GraphMissError, MissPolicy, RecompileError
from graphs.interrupts import Deferral
from hpu_duo.device import DeviceRuntime
from hpu_duo.device.ranks import RankError
from hpu_duo.drafting import Drafter
from hpu_duo.engine.compile_watch import CompileWatch
from hpu_duo.engine.drafts import (
    ON_THE_HOST,
    Drafting,
    SpeculationCounters,
    num_verified,
    without_rejected,
    write_model_drafts,
)
from hpu_duo.engine.executor import Executor, LaunchedStep, StepWarmUp
from hpu_duo.engine.orders import OpenDisk
from hpu_duo.engine.outputs import OutputQueue, TokenLogprob, logprobs_of
from hpu_duo.engine.replanning import Replanner
from hpu_duo.engine.samples import LiveSamples
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.step_input import BuiltStep, StepBuilder, StepResult
from hpu_duo.engine.step_plan import CommittedToken, StepPlan
from hpu_duo.engine.telemetry import Replanning, ShapeWatch, Telemetry
from hpu_duo.kv.pool import Copy
from hpu_duo.kv.store import KVStore
from hpu_duo.kv.tiers.host_link import HostRecords
from hpu_duo.kv.tiers.link import Transfers
from hpu_duo.modeling.step_model import StepModel
from hpu_duo.not_picklable import NotPicklable
from hpu_duo.request import FinishReason, Request
from hpu_duo.sampling import SamplingRow, choose_on_host

NO_ERRORS: Mapping[int, Exception] = MappingProxyType({})


class StepHandle(NamedTuple):
    """A step between its two phases: all that is needed to finish it.

    Attributes:
        plan: the planned step.
        built: its message, and what of it stays on the host.
        launched: its results on the device.
        device_s: seconds of the launch on the device, or of enqueuing it there.
        errors: errors of rows without sampling parameters, by ring row.
        groups: the handles of its groups of rows, where it runs as several; the first group's message and
            results are those above.
    """

    plan: StepPlan
    built: BuiltStep
    launched: LaunchedStep
    device_s: float
    errors: Mapping[int, Exception]
    groups: tuple[StepHandle, ...] = ()


class Runner(NotPicklable):
    """A builder of messages, and the executor that runs them.

    Args:
        executor: the device side.
        vocab_size: width of the logits.
        max_model_len: most tokens of a request.

    Attributes:
        builder: the host side.
        warmup: captures buckets ahead of traffic.
    """

    def __init__(self, executor: Executor, vocab_size: int, max_model_len: int) -> None:
        self.executor = executor
        self.builder = StepBuilder(
            executor.geometry,
            executor.largest,
            executor.bucket_of,
            vocab_size,
            is_static=executor.runtime.compiles_operators,
        )
        self.warmup = StepWarmUp(self.builder, executor, vocab_size, max_model_len)

    def launch(
        self,
        plan: StepPlan,
        sampling: Mapping[int, Sequence[SamplingRow]],
        errors: Mapping[int, Exception] = NO_ERRORS,
    ) -> StepHandle:
        """Build the message of a plan, and put its work on the device.

        Args:
            sampling: see ``StepBuilder.build``.
            errors: errors of rows that are not in ``sampling``, by ring row.

        Raises:
            GraphMissError: the step fits no bucket, and ``on_miss`` is "error".
        """
        built = self.builder.build(plan, sampling)
        began = time.perf_counter()
        launched = self.executor.launch(built.message)
        return StepHandle(plan, built, launched, time.perf_counter() - began, errors)

    def finish(self, handle: StepHandle) -> StepResult:
        """Wait for a launched step, and choose the tokens of rows that are sampled on the host.

        Raises:
            RecompileError: the step compiled something although ``fail_on_recompile`` is set.
        """
        built = handle.built
        began = time.perf_counter()
        output = self.executor.finish(handle.launched)
        token_ids, failed = output.token_ids, built.errors
        if output.logits is not None:
            token_ids, failed = _choose_on_host(built, output.token_ids, output.logits)
        device_s = handle.device_s + time.perf_counter() - began
        errors = {row: (0, error) for row, error in handle.errors.items()}
        for index in sorted(failed, reverse=True):
            ring_row, number = divmod(index, self.executor.geometry.row_len(built.message.bucket))
            errors[ring_row] = number, failed[index]
        return StepResult(built.message, token_ids, output.logprobs, device_s, errors, output.drafted)

    def carry_out(self, copies: Sequence[Copy], transfers: Transfers | None = None) -> None:
        """Copy units of the stores between steps, at most as many as in a step, and begin transfers."""
        self.executor.carry_out(self.builder.copying(copies, self.executor.largest, transfers))

    def open_disk(self, fingerprint: bytes) -> str | None:
        """Open the folders of records of all ranks; returns the error of one of them.

        Args:
            fingerprint: SHA-256 of all that records depend on.
        """
        link = self.executor.link
        assert isinstance(link, HostRecords), "expected records in host memory"
        assert link.disk is not None, "expected a folder of this rank"
        with self.executor.leading(OpenDisk(fingerprint)):
            return link.disk.open(fingerprint)

    def close_disk(self) -> None:
        """Wait for the end of what a worker rank does in its folder, if it has one."""
        link = self.executor.link
        if isinstance(link, HostRecords) and link.disk is not None:
            link.disk.close()

    def set_table(self, table: BucketTable, policy: MissPolicy) -> None:
        """See ``Executor.set_table``."""
        self.executor.set_table(table, policy)

    @property
    def table(self) -> BucketTable:
        """The bucket table."""
        return self.executor.graphs.table

    def exchange(self, added: BatchShape, dropped: BatchShape, padding: float | None = None) -> None:
        """See ``StepWarmUp.exchange``."""
        self.warmup.exchange(added, dropped, padding)

    @property
    def model(self) -> StepModel:
        """The model that steps run."""
        return self.executor.model

    @property
    def store(self) -> KVStore:
        """The stores of keys and values."""
        return self.executor.store

    @property
    def graphs(self) -> GraphCache:
        """The captured steps."""
        return self.executor.graphs

    @property
    def watch(self) -> CompileWatch:
        """The counts of compilations."""
        return self.executor.watch

    @property
    def runtime(self) -> DeviceRuntime:
        """The device's runtime."""
        return self.executor.runtime

    @property
    def device(self) -> torch.device:
        """The device that steps run on."""
        return self.executor.device


@torch.inference_mode()
def _choose_on_host(
    built: BuiltStep, token_ids: npt.NDArray[np.int32], logits: torch.Tensor
) -> tuple[npt.NDArray[np.int32], dict[int, Exception]]:
    """Sample host-sampled rows; returns the tokens of all rows, and the errors by row of logits."""
    chosen, failed = choose_on_host(built.host_sampled, logits)
    place_of = {row: place for place, row in enumerate(built.message.sampled.tolist())}
    for row, token in chosen.items():
        token_ids[place_of[row]] = token
    return token_ids, {**built.errors, **failed}


_MOST_FAILURES = 2
"""Number of failed steps with a request after which it runs alone."""


class FailureIsolation:
    """Isolates the request that makes steps fail: requests of failed steps run alone, one after the other.

    A request is suspect after two failed steps without a token between them. A step that fits no bucket would
    be planned again in the same shape, so its requests are suspect at once.

    Only unfinished requests are stored.

    Attributes:
        last_failed: requests of the last step, if it failed.
        num_failures: failing steps of each suspect.
    """

    def __init__(self) -> None:
        self.last_failed: tuple[Request, ...] = ()
        self.num_failures: dict[Request, int] = {}
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
            self.num_failures[request] = self.num_failures.get(request, 0) + 1
        self._queue.extend(r for r in requests if is_miss or self.num_failures[r] >= _MOST_FAILURES)
        return None

    def forget(self, request: Request) -> None:
        """Remove an ended request."""
        self.last_failed = tuple(each for each in self.last_failed if each is not request)
        self.num_failures.pop(request, None)
        if request in self._queue:
            self._queue.remove(request)

    def clear(self, plan: StepPlan) -> None:
        """Record a step that succeeded: requests with a new token are no longer suspect."""
        alone = self.alone
        for row in plan.sampled_rows:
            self.num_failures.pop(row.request, None)
            if row.request is alone:
                self._queue.popleft()


class Stepper:
    """Runs steps, each in two phases, one after the other.

    ``launch`` puts a planned step on the device, and ``finish`` waits for it and commits its tokens. The
    handle has all state for the second phase, so another step could be launched meanwhile if the scheduler
    planned on the assumed results of this one.

    All methods are called with interrupts deferred, by one thread at a time.

    Attributes:
        samples: the samples that have not ended.
        output_queue: receives the outputs.
        telemetry: recorders of steps and their shapes.
        speculation: counts of drafts.
        replanner: plans the bucket table again while serving; None = it stays as it is.

    Args:
        runner: the device side.
        scheduler: plans the steps.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.samples, self.output_queue = LiveSamples(), OutputQueue()
        replanning = Replanning(runner.model.model.name_or_path or "DIR", scheduler.limits)
        self.telemetry = Telemetry(ShapeWatch(lambda: runner.graphs.table, replanning))
        self._runner, self._scheduler = runner, scheduler
        self.replanner: Replanner | None = None
        self._isolation = FailureIsolation()
        self._uncollected: deque[tuple[CommittedToken, TokenLogprob | None]] = deque()
        self._drafting: Drafting | None = None
        self.speculation = SpeculationCounters()
        self._is_stepping = False
        self._aborted_meanwhile: list[str] = []

    @property
    def drafter(self) -> Drafter | None:
        """Proposes tokens that decodes verify; None = no drafts."""
        return None if self._drafting is None else self._drafting.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        """Draft with it from the next step on.

        Raises:
            ValueError: rows decode one token in a step.
        """
        decode_len, vocab_size = self._scheduler.limits.decode_len, self._runner.builder.vocab_size
        if drafter is not None and decode_len == 1:
            raise ValueError(
                "expected decode_len of 2 or more to verify drafts of a drafter, got decode_len=1: a step "
                "verifies decode_len - 1 drafts of a request"
            )
        self._drafting = None
        if drafter is not None:
            lens, tables = self._scheduler.limits.draft_lens, self._runner.builder.drafts
            self._drafting = Drafting(
                *(drafter, self.samples, vocab_size, self.speculation, lens),
                num_model_drafts=0 if tables is None else decode_len - 1,
                can_begin=None if tables is None else tables.can_begin,
            )
        self._scheduler.drafting = self._drafting

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user on what is served."""
        return (ON_THE_HOST,) if self._drafting is not None and self._drafting.has_host_rows else ()

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
            if self.replanner is not None:
                with deferral.lifted():
                    self.replanner.advance()
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
        if not plan.rows:
            self._transfer(plan, deferral)
            return
        counters = self.telemetry.counters
        device_s = counters.device_s
        if (handle := self.launch(plan, deferral)) is not None:
            committed = self.finish(handle, deferral)
            self._collect()
            if self._drafting is not None and committed:
                self._drafting.ran(plan, len(committed), time.perf_counter() - began)
        counters.host_s += time.perf_counter() - began - (counters.device_s - device_s)

    def _transfer(self, plan: StepPlan, deferral: Deferral) -> None:
        """Run a plan without rows, and wait until a record has landed."""
        with deferral.lifted():
            self._runner.carry_out(plan.moves, plan.transfers)
            if (tiers := self._scheduler.allocations.tiers) is not None:
                tiers.wait_any()
        self._scheduler.commit(plan, ())

    def launch(self, plan: StepPlan, deferral: Deferral) -> StepHandle | None:
        """Put a planned step on the device; None if that has failed, and its request has ended for it.

        Raises:
            Exception: it has failed, and no request is known to be at fault.
        """
        sampling, errors = dict[int, Sequence[SamplingRow]](), dict[int, Exception]()
        for row in plan.sampled_rows:
            try:
                state = self.samples[row.request.request_id]
                sampling[row.ring_row] = (
                    (state.sampling_row(),) if row.num_samples == 1 else state.sampling_rows(row.num_samples)
                )
            except Exception as error:
                errors[row.ring_row] = error
        try:
            with deferral.lifted():
                return self._runner.launch(plan, sampling, errors)
        except Exception as error:
            self._blame(plan, error)
            return None

    def finish(self, handle: StepHandle, deferral: Deferral) -> list[CommittedToken]:
        """Wait for a launched step, and commit its tokens; they wait for ``_collect``.

        Returns:
            What it adds to requests; nothing if it has failed, and its request has ended for it.

        Raises:
            Exception: it has failed, and no request is known to be at fault.
        """
        plan = handle.plan
        try:
            with deferral.lifted():
                result = self._runner.finish(handle)
        except Exception as error:
            self._blame(plan, error)
            return []
        if self._isolation.num_failures:
            self._isolation.clear(plan)
        logprobs = {} if result.logprobs is None else logprobs_of(plan, result.token_ids, result.logprobs)
        accepted, taken = None, plan
        if plan.num_samples > len(plan.sampled_rows):
            drafted = () if result.drafted is None else write_model_drafts(plan, result.drafted)
            accepted = num_verified(plan, result.token_ids, result.errors, self._drafting, drafted)
            taken = without_rejected(plan, accepted)
        allocations = self._scheduler.allocations
        self.telemetry.note(taken, result, allocations, self._runner.executor.store.plan)
        if allocations.tiers is not None and result.shape.phase.causal:
            allocations.tiers.load_policy.computed(plan.num_tokens, result.device_s)
        if result.errors:
            for row in plan.sampled_rows:
                first, failure = result.errors.get(row.ring_row, (1, None))
                if failure is not None and not first:
                    self._fail(row.request, failure)
        committed = self._scheduler.commit(plan, result.token_ids, accepted)
        if self._drafting is not None:
            self._drafting.follow(plan)
        self.telemetry.counters.num_output_tokens += len(committed)
        self._uncollected.extend((each, logprobs.get(each.sample)) for each in committed)
        return committed

    def _blame(self, plan: StepPlan, error: Exception) -> None:
        """End the request that is at fault for a step that failed; raise the error if none is known."""
        if isinstance(error, RecompileError | RankError):
            raise error  # the fault of no request
        culprit = self._isolation.culprit(plan, error)
        if culprit is None:
            raise error
        self._fail(culprit, error)

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
            if self._drafting is not None and request.params.prediction_token_ids:
                output = replace(output, num_predicted=self._drafting.predicted_of(request))
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
        if self._drafting is not None:
            self._drafting.end(request)
        self.samples.remove(request.request_id)
