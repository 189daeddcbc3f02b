"""Counts and records of steps, whose errors make no step fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from hpu_duo.engine.stats import StepCounters

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from graphs.recording import ShapeRecorder
    from hpu_duo.engine.message import StepMessage
    from hpu_duo.engine.runner import StepResult
    from hpu_duo.engine.shape_watch import ShapeWatch
    from hpu_duo.engine.step_plan import StepPlan
    from hpu_duo.kv.leases import KVLeases
    from hpu_duo.kv.plan import MemoryPlan

_log = logging.getLogger(__name__)


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
        is_noted = self._try(lambda: self.counters.count(plan, result, leases, memory))
        is_noted &= self._try(partial(self.shapes.add, result.shape, result.bucket))
        if self.recorder is not None:
            is_noted &= self._try(partial(self.recorder.add, result.shape))
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
