"""Counts and records of steps, whose errors make no step fail."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from hpu_duo.engine.budget_stats import num_given_up
from hpu_duo.engine.rule_stats import TileCounts, add_tiles

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from graphs.recording import ShapeRecorder
    from hpu_duo.engine.message import StepMessage
    from hpu_duo.engine.runner import StepResult
    from hpu_duo.engine.shape_watch import ShapeWatch
    from hpu_duo.engine.step_plan import StepPlan
    from hpu_duo.kv.leases import KVLeases
    from hpu_duo.kv.plan import MemoryPlan, SparseKind

_log = logging.getLogger(__name__)


@dataclass
class StepCounters:
    """Running totals; the engine is their only writer."""

    steps: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_padded_tokens: int = 0
    num_query_tokens: int = 0
    num_preemptions: int = 0
    num_unrecorded_steps: int = 0
    num_given_up: Counter[int] = field(default_factory=Counter)
    tiles: dict[SparseKind, TileCounts] = field(default_factory=dict)
    peak_cached_tokens: int = 0
    peak_held_bytes: int = 0
    peak_full_attention_bytes: int = 0
    peak_unshared_bytes: int = 0
    host_s: float = 0.0
    device_s: float = 0.0

    def count(self, plan: StepPlan, result: StepResult, leases: KVLeases, memory: MemoryPlan) -> None:
        """Account for a step that has run, before anything of it is given back."""
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
        self.num_output_tokens += len(result.token_ids)
        self.num_query_tokens += bucket.query_len
        self.num_padded_tokens += bucket.query_len - shape.query_len
        self.num_preemptions += len(plan.preempted)
        if memory.budgets:
            self.num_given_up.update(num_given_up(plan, memory))
        if memory.sparse_heads:
            add_tiles(self.tiles, plan, memory)
        if cached >= self.peak_cached_tokens:
            self.peak_cached_tokens = cached
            self.peak_held_bytes = held_bytes(leases, memory)
            self.peak_full_attention_bytes = memory.full_attention_bytes(cached)
            self.peak_unshared_bytes = num_blocks * memory.block_bytes + len(plan.rows) * memory.row_bytes


def held_bytes(leases: KVLeases, memory: MemoryPlan) -> int:
    """Bytes of the leased blocks and rows; blocks that several requests share count once."""
    return leases.blocks.num_used * memory.block_bytes + leases.rows.num_used * memory.row_bytes


class StepSink(Protocol):
    """A recorder of steps, such as ``hpu_duo.steplog.StepRecorder``."""

    def add(self, message: StepMessage, token_ids: npt.NDArray[np.int32]) -> None:
        """Record a step that has run, and the tokens of ``message.sampled``."""
        ...


class StepListener(Protocol):
    """An object that hears of every step, such as ``hpu_duo.watch.step_profiler.StepProfiler``."""

    def stepped(self) -> None:
        """A step has ended; called in the thread that made it."""
        ...


class Telemetry:
    """Counts steps, and records their shapes.

    Attributes:
        counters: running totals.
        shapes: a sample of the shapes of steps, and what they pad.
        recorder: takes the exact shape of every step; None records nothing.
        step_recorder: takes every step; None records nothing.
        profiler: hears of every step; None for nobody.
    """

    def __init__(self, shapes: ShapeWatch) -> None:
        self.counters, self.shapes = StepCounters(), shapes
        self.recorder: ShapeRecorder | None = None
        self.step_recorder: StepSink | None = None
        self.profiler: StepListener | None = None

    def note(self, plan: StepPlan, result: StepResult, leases: KVLeases, memory: MemoryPlan) -> None:
        """Account for a step that has run, before anything of it is given back.

        Errors, of a full disk say, are counted, and the first one is logged.
        """
        shape, bucket = result.message.shape, result.message.bucket
        is_noted = self._try(partial(self.counters.count, plan, result, leases, memory))
        is_noted &= self._try(partial(self.shapes.add, shape, bucket))
        if self.recorder is not None:
            is_noted &= self._try(partial(self.recorder.add, shape))
        if self.step_recorder is not None:
            is_noted &= self._try(partial(self.step_recorder.add, result.message, result.token_ids))
        # Last: what is noted of a step belongs to the profile of that step.
        if self.profiler is not None:
            is_noted &= self._try(self.profiler.stepped)
        self.counters.num_unrecorded_steps += not is_noted

    def _try(self, note: Callable[[], None]) -> bool:
        """Call ``note``; returns whether it succeeded."""
        try:
            note()
        except Exception as error:
            if not self.counters.num_unrecorded_steps:
                _log.warning("a step could not be recorded, and is served all the same: %s", error)
            return False
        return True
