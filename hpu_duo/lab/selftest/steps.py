"""Steps recorded on the CPU, and their logits on any engine, to compare kernels and graphs by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from graphs import BucketTable, MissPolicy
from hpu_duo.engine.executor import bucket_step
from hpu_duo.lab.selftest.subject import Subject, run_prompts
from hpu_duo.startup.tables import default_table

if TYPE_CHECKING:
    from hpu_duo.engine.step_input import StepInput
    from hpu_duo.llm import HPUDuoModel

_COLD: dict[str, Any] = {"enable_prefix_caching": False}
"""Messages have places for block moves where there is a prefix cache and the kernels want dense blocks.
Without a cache all kernels take the same messages."""


@dataclass(frozen=True)
class RecordedSteps:
    """A run of the built-in model on the CPU, in float32, by the reference kernels.

    Attributes:
        table: the buckets that its steps are padded to.
        messages: the steps in order.
        logits: of the sampled rows of each step, float32 ``[S, V]``.
        tokens: of each prompt.
    """

    table: BucketTable
    messages: tuple[StepInput, ...]
    logits: tuple[torch.Tensor, ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases of the buckets of the steps, each once."""
        return tuple(dict.fromkeys(str(message.bucket.phase) for message in self.messages))

    def load(self, subject: Subject, **options: Any) -> HPUDuoModel:
        """Load the built-in model so that it can carry out these steps; see ``Subject.load``."""
        return subject.load(buckets=self.table, **_COLD, **options)


class _Messages:
    def __init__(self) -> None:
        self.found: list[StepInput] = []

    def add(self, message: StepInput, token_ids: npt.NDArray[np.int32]) -> None:
        self.found.append(message)


def record_steps(subject: Subject) -> RecordedSteps:
    """Serve the subject's prompts on the CPU, padded to the default table, and keep every step."""
    model = subject.load("cpu", attention="reference", dtype="float32", graphs="eager", **_COLD)
    runner, config = model.engine.runner, model.config.get_text_config()
    table = default_table(model.engine.scheduler.limits, runner.model.specs, config)
    runner.set_table(table, MissPolicy.ERROR)
    sink = _Messages()
    model.engine.step_recorder = sink
    tokens = run_prompts(model, subject.prompts(config.vocab_size))
    model.engine.step_recorder = None
    messages = tuple(sink.found)
    logits = tuple(sampled_rows(run_captured(model, message), message) for message in messages)
    return RecordedSteps(table, messages, logits, tuple(tokens))


def run_uncaptured(model: HPUDuoModel, message: StepInput) -> torch.Tensor:
    """Run a step operator by operator, whatever the capture backend; returns logits on the device."""
    executor = model.engine.runner.executor
    with torch.inference_mode(), executor.runtime.step():
        inputs = executor.copy_in(message)
        executor.copy_units(inputs, message.num_block_copies, message.num_row_copies)
        executor.model.live.set(message.shape, message.bucket, executor.geometry.row_len(message.bucket))
        return bucket_step(executor.model, executor.geometry, message.bucket, {})(inputs)


def run_captured(model: HPUDuoModel, message: StepInput) -> torch.Tensor:
    """Run a step as the engine does, by its captured graph; returns logits on the device."""
    executor = model.engine.runner.executor
    with executor.runtime.step():
        return executor.logits(message)


Run = Callable[["HPUDuoModel", "StepInput"], torch.Tensor]


def sampled_rows(logits: torch.Tensor, message: StepInput) -> torch.Tensor:
    """Logits of the sampled rows, on the host, float32 ``[S, V]``."""
    return logits.cpu()[torch.from_numpy(message.sampled).long()].float()


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference by the largest expected magnitude; infinite where a value is not finite."""
    if not torch.isfinite(got).all():
        return float("inf")
    if not got.numel():
        return 0.0
    return float(
        (got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
    )


def worst_by_phase(model: HPUDuoModel, steps: RecordedSteps, run: Run) -> dict[str, float]:
    """Run all steps in order; returns the largest relative error of each phase."""
    worst: dict[str, float] = dict.fromkeys(steps.phases, 0.0)
    for message, expected in zip(steps.messages, steps.logits):
        phase = str(message.bucket.phase)
        got = sampled_rows(run(model, message), message)
        worst[phase] = max(worst[phase], relative_error(got, expected))
    return worst
