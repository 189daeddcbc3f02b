"""Runs planned steps: built on the host, executed on the device, finished on the host."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from graphs import BatchShape, BucketTable, GraphCache, MissPolicy
from hpu_duo.device import DeviceRuntime
from hpu_duo.engine.compile_watch import CompileWatch
from hpu_duo.engine.executor import Executor, StepWarmUp
from hpu_duo.engine.step_input import BuiltStep, StepBuilder, StepInput
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.kv.copies import Copy
from hpu_duo.kv.store import KVStore
from hpu_duo.modeling.step_model import StepModel
from hpu_duo.not_picklable import NotPicklable
from hpu_duo.sampling import SamplingRow, TokenLogprobs, choose_on_host


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
        message: the step.
        token_ids: int32 ``[plan.num_samples]``, row after row.
        logprobs: CPU tensors with one entry per ``token_ids``, if some request has them enabled.
        build_s: seconds spent on the host to build the message.
        errors: errors of rows that could not be sampled, by ring row; their tokens are undefined.
    """

    message: StepInput
    token_ids: npt.NDArray[np.int32]
    logprobs: TokenLogprobs | None
    build_s: float
    errors: Mapping[int, Exception] = field(default_factory=dict)

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

    @torch.inference_mode()
    def run(self, plan: StepPlan, sampling: Mapping[int, Sequence[SamplingRow]]) -> StepResult:
        """Run one plan.

        Args:
            sampling: see ``StepBuilder.build``.

        Raises:
            GraphMissError: no bucket holds the step, and that is an error.
            RecompileError: the step compiled something although ``fail_on_recompile`` is set.
        """
        began = time.perf_counter()
        built = self.builder.build(plan, sampling)
        build_s = time.perf_counter() - began
        output = self.executor.execute(built.message)
        token_ids, errors = output.token_ids, built.errors
        if output.logits is not None:
            token_ids, errors = _choose_on_host(built, output.token_ids, output.logits)
        decode_len = self.executor.geometry.decode_len
        by_ring_row = {row // decode_len: error for row, error in errors.items()}
        return StepResult(built.message, token_ids, output.logprobs, build_s, by_ring_row)

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


def _choose_on_host(
    built: BuiltStep, token_ids: npt.NDArray[np.int32], logits: torch.Tensor
) -> tuple[npt.NDArray[np.int32], dict[int, Exception]]:
    """Sample host-sampled rows; returns the tokens of all rows, and the errors by row of logits."""
    chosen, failed = choose_on_host(built.host_sampled, logits)
    place_of = {row: place for place, row in enumerate(built.message.sampled.tolist())}
    for row, token in chosen.items():
        token_ids[place_of[row]] = token
    return token_ids, {**built.errors, **failed}
