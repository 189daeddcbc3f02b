"""Records about steps; nothing here makes a step fail."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hpu_duo.engine.stats import StepCounters

if TYPE_CHECKING:
    from graphs.recording import ShapeRecorder
    from hpu_duo.engine.runner import StepResult
    from hpu_duo.engine.step_plan import StepPlan
    from hpu_duo.kv.leases import KVLeases
    from hpu_duo.kv.plan import MemoryPlan

_log = logging.getLogger(__name__)


class Telemetry:
    """Counts steps, and records their shapes.

    Attributes:
        counters: running totals.
        recorder: takes the exact shape of every step; None records nothing.
    """

    def __init__(self) -> None:
        self.counters = StepCounters()
        self.recorder: ShapeRecorder | None = None

    def note(self, plan: StepPlan, result: StepResult, leases: KVLeases, memory: MemoryPlan) -> None:
        """Account for a step that has run, before anything of it is given back.

        What goes wrong here, such as a full disk, is counted and logged once.
        """
        try:
            self.counters.count(plan, result, leases, memory)
            if self.recorder is not None:
                self.recorder.add(result.shape)
        except Exception as error:
            if not self.counters.num_unrecorded_steps:
                _log.warning("a step could not be recorded, and is served all the same: %s", error)
            self.counters.num_unrecorded_steps += 1
