"""Runs planned steps: built on the host, executed on the device, finished on the host."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from graphs import BatchShape, BucketTable, GraphCache, MissPolicy
from hpu_duo.device import DeviceRuntime
from hpu_duo.engine.compile_watch import CompileWatch
from hpu_duo.engine.executor import Executor, LaunchedStep, StepWarmUp
from hpu_duo.engine.step_input import BuiltStep, StepBuilder, StepInput
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.kv.copies import Copy
from hpu_duo.kv.store import KVStore
from hpu_duo.modeling.step_model import StepModel
from hpu_duo.not_picklable import NotPicklable
from hpu_duo.sampling import SamplingRow, TokenLogprobs, choose_on_host

NO_ERRORS: Mapping[int, Exception] = MappingProxyType({})


class StepHandle(NamedTuple):
    """A step between its two phases: all that is needed to finish it.

    Attributes:
        plan: the planned step.
        built: its message, and what of it stays on the host.
        launched: its results on the device.
        device_s: seconds of the launch on the device, or of enqueuing it there.
        errors: errors of rows without sampling parameters, by ring row.
    """

    plan: StepPlan
    built: BuiltStep
    launched: LaunchedStep
    device_s: float
    errors: Mapping[int, Exception]


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
        message: the step.
        token_ids: int32 ``[plan.num_samples]``, row after row.
        logprobs: CPU tensors with one entry per ``token_ids``, if some request has them enabled.
        device_s: seconds of the device, both phases together.
        errors: errors of rows that could not be sampled, by ring row, each with the number of its first
            token that is undefined: 0, or more behind drafts.
    """

    message: StepInput
    token_ids: npt.NDArray[np.int32]
    logprobs: TokenLogprobs | None
    device_s: float
    errors: Mapping[int, tuple[int, Exception]] = field(default_factory=dict)

    @property
    def shape(self) -> BatchShape:
        """The exact shape."""
        return self.message.shape

    @property
    def bucket(self) -> BatchShape:
        """The bucket that it was padded to."""
        return self.message.bucket


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
            ring_row, number = divmod(index, self.executor.geometry.decode_len)
            errors[ring_row] = number, failed[index]
        return StepResult(built.message, token_ids, output.logprobs, device_s, errors)

    @torch.inference_mode()
    def carry_out(self, copies: Sequence[Copy]) -> None:
        """Copy units of the stores between steps, at most as many as in a step."""
        executor = self.executor
        message = self.builder.copying(copies, executor.largest)
        with executor.runtime.step():
            fields = executor.copy_in(message)
            executor.copy_units(fields, message.num_block_copies, message.num_row_copies)

    def set_table(self, table: BucketTable, policy: MissPolicy) -> None:
        """See ``Executor.set_table``."""
        self.executor.set_table(table, policy)

    @property
    def table(self) -> BucketTable:
        """The bucket table."""
        return self.executor.graphs.table

    def exchange(self, added: BatchShape, dropped: BatchShape) -> None:
        """See ``StepWarmUp.exchange``."""
        self.warmup.exchange(added, dropped)

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
