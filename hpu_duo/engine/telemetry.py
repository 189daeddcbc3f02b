"""Counters and records of steps, and a sample of their shapes. An error here never fails a step."""

from __future__ import annotations

import logging
import os
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from graphs import BatchShape, BucketTable, StepLimits
from graphs.bucket_file import write_shapes
from graphs.planner.cells import price, to_levels
from graphs.table import ShapeReservoir
from hpu_duo.engine.head_stats import TileCounts, add_tiles, num_evicted_tokens

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from graphs.bucket_file import ShapeRecorder
    from hpu_duo.engine.step_input import StepInput, StepResult
    from hpu_duo.engine.step_plan import StepPlan
    from hpu_duo.kv.allocations import KVAllocations
    from hpu_duo.kv.plan import MemoryPlan, SparseKind

_log = logging.getLogger(__name__)


@dataclass
class StepCounters:
    """Running totals; the engine is their only writer."""

    steps: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_padded_tokens: int = 0
    num_query_tokens: int = 0
    num_preemptions: int = 0
    num_unrecorded_steps: int = 0
    num_evicted_tokens: Counter[int] = field(default_factory=Counter)
    tiles: dict[SparseKind, TileCounts] = field(default_factory=dict)
    peak_cached_tokens: int = 0
    peak_held_bytes: int = 0
    peak_unshared_bytes: int = 0
    host_s: float = 0.0
    device_s: float = 0.0

    def count(
        self, plan: StepPlan, result: StepResult, allocations: KVAllocations, memory: MemoryPlan
    ) -> None:
        """Count a completed step, before anything of it is released."""
        shape, bucket = result.message.shape, result.message.bucket
        self.steps[str(shape.phase)] += 1
        cached = num_blocks = 0
        for row in plan.rows:
            end = row.end
            cached += end
            num_blocks += -(-end // memory.block_size)
            known = row.request.num_prompt_tokens
            if row.start < known:
                self.num_prompt_tokens += min(end, known) - row.start
        self.num_query_tokens += bucket.query_len
        self.num_padded_tokens += bucket.query_len - shape.query_len
        self.num_preemptions += len(plan.preempted)
        self.device_s += result.device_s
        if memory.budgets:
            self.num_evicted_tokens.update(num_evicted_tokens(plan, memory))
        if memory.sparse_heads:
            add_tiles(self.tiles, plan, memory)
        if cached >= self.peak_cached_tokens:
            self.peak_cached_tokens = cached
            self.peak_held_bytes = held_bytes(allocations, memory)
            self.peak_unshared_bytes = num_blocks * memory.block_bytes + len(plan.rows) * memory.row_bytes


def held_bytes(allocations: KVAllocations, memory: MemoryPlan) -> int:
    """Bytes of the allocated blocks and rows; blocks that several requests share count once."""
    return allocations.blocks.num_used * memory.block_bytes + allocations.rows.num_used * memory.row_bytes


class StepSink(Protocol):
    """A recorder of steps, such as ``startup.recorded_steps.StepRecorder``."""

    def add(self, message: StepInput, token_ids: npt.NDArray[np.int32]) -> None:
        """Record a completed step, and the tokens of ``message.sampled``."""
        ...


class StepListener(Protocol):
    """An object that is notified of every step, such as ``hpu_duo.lab.step_profiler.StepProfiler``."""

    def stepped(self) -> None:
        """Called after a step, in the thread that ran it."""
        ...


class Telemetry:
    """Counts steps and records their shapes.

    Attributes:
        counters: running totals.
        shapes: a sample of the shapes of steps, and their padding.
        recorder: of the exact shape of every step, or None.
        step_recorder: of every step, or None.
        profiler: notified of every step, or None.
    """

    def __init__(self, shapes: ShapeWatch) -> None:
        self.counters, self.shapes = StepCounters(), shapes
        self.recorder: ShapeRecorder | None = None
        self.step_recorder: StepSink | None = None
        self.profiler: StepListener | None = None

    def note(
        self, plan: StepPlan, result: StepResult, allocations: KVAllocations, memory: MemoryPlan
    ) -> None:
        """Count a completed step, before anything of it is released.

        Errors, such as of a full disk, are counted, and the first one is logged.
        """
        shape, bucket = result.message.shape, result.message.bucket
        is_noted = self._try(partial(self.counters.count, plan, result, allocations, memory))
        is_noted &= self._try(partial(self.shapes.add, shape, bucket))
        if self.recorder is not None:
            is_noted &= self._try(partial(self.recorder.add, shape))
        if self.step_recorder is not None:
            is_noted &= self._try(partial(self.step_recorder.add, result.message, result.token_ids))
        # Last, so that the profile of a step includes its recording.
        if self.profiler is not None:
            is_noted &= self._try(self.profiler.stepped)
        self.counters.num_unrecorded_steps += not is_noted

    def _try(self, note: Callable[[], None]) -> bool:
        """Call ``note``; returns whether it succeeded."""
        try:
            note()
        except Exception as error:
            if not self.counters.num_unrecorded_steps:
                _log.warning("cannot record a step, which is served nevertheless: %s", error)
            return False
        return True


WINDOW = 2048
"""Number of steps in a window."""

_TIMES, _MORE = 2.0, 0.1


@dataclass(frozen=True)
class Drift:
    """Padding far beyond what the bucket table was planned for.

    Attributes:
        promised, seen: mean cost of padded steps over that of exact ones, minus 1: of the traffic that the
            table was planned for, and of a window of steps.
        num_steps: size of the window.
        command: the command that plans another table from the shapes of recent steps.
    """

    promised: float
    seen: float
    num_steps: int
    command: str

    def __str__(self) -> str:
        return (
            f"the last {self.num_steps:,} steps pad {self.seen:.0%}, and their bucket table promises "
            f"{self.promised:.0%}: it was planned for other traffic. To plan for this one: {self.command}"
        )


@dataclass(frozen=True)
class Replanning:
    """The command that plans a new table.

    Attributes:
        model: directory of the model.
        limits: of the engine.
    """

    model: str
    limits: StepLimits

    def command(self, num_graphs: int, recording: Path) -> str:
        """The command line, for a table of as many graphs and the shapes in a file."""
        limits = self.limits
        options = {
            "--model": self.model,
            "--max-num-seqs": limits.max_num_seqs,
            "--max-num-batched-tokens": limits.max_num_batched_tokens,
            "--max-model-len": limits.max_model_len,
            "--max-chunk-rows": limits.max_chunk_rows,
            "--decode-len": limits.decode_len,
            "--block-size": limits.block_size,
            "--num-blocks": limits.num_blocks,
            "--graphs-budget": num_graphs,
            "--from-shapes": recording,
            "--out": "table.txt",
        }
        words = (word for option in options.items() for word in map(str, option))
        return shlex.join(["hpu-duo", "plan", *words])


class ShapeWatch:
    """Samples the shapes of steps, and warns once when padding far exceeds that of the planned traffic.

    Args:
        table: the current table; one that was not planned has no planned padding.
        replanning: the command that plans another one.
        num_judged: number of steps in a window.

    Attributes:
        num_judged: number of steps in a window; may be changed before the first step.
        reservoir: the sample.
        recording: file that all shapes are written to; None writes the sample to a temporary file with the
            warning.
        drift: what the warning reported; None without a warning.
    """

    def __init__(
        self,
        table: Callable[[], BucketTable],
        replanning: Replanning,
        num_judged: int = WINDOW,
    ) -> None:
        self.reservoir = ShapeReservoir()
        self.recording: Path | None = None
        self.drift: Drift | None = None
        self._table, self._replanning = table, replanning
        self.num_judged = num_judged
        self._window: list[tuple[BatchShape, BatchShape]] = []

    def add(self, shape: BatchShape, bucket: BatchShape) -> None:
        """Count a step and the bucket that it was padded to."""
        self.reservoir.add(shape)
        if self.drift is None:
            self._window.append((shape, bucket))
            if len(self._window) == self.num_judged:
                window, self._window = self._window, []
                self._judge(window)

    def _judge(self, window: list[tuple[BatchShape, BatchShape]]) -> None:
        table = self._table()
        planned_padding, cost = table.planned_padding, table.cost
        if planned_padding is None or not planned_padding.is_by(cost):
            return
        exact, padded = (price(cost, to_levels(shapes)).sum() for shapes in zip(*window))
        seen = float(padded / exact) - 1
        if seen > _TIMES * planned_padding.padding + _MORE:
            command = self._replanning.command(len(table), self.recording or self._write())
            self.drift = Drift(planned_padding.padding, seen, len(window), command)
            _log.warning("%s", self.drift)

    def _write(self) -> Path:
        descriptor, name = tempfile.mkstemp(prefix="hpu-duo-shapes-", suffix=".jsonl")
        os.close(descriptor)
        write_shapes(name, self.reservoir.counts())
        return Path(name)
