"""The cost of steps by which buckets of an HPU are ranked and planned: their predicted seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphs import BatchShape, Phase
from hpu_duo.planning.attention_counts import Shapes
from hpu_duo.planning.engine_work import EngineWork
from hpu_duo.planning.model import Hardware
from hpu_duo.planning.roofline import FITTED, predict_seconds

_MOST_KNOWN = 4096


@dataclass(frozen=True)
class StepSeconds:
    """A cost function: predicted seconds of a step, with the operators that ``hpu-duo audit`` counts.

    Attributes:
        work: of the steps of an engine.
        hardware: that they run on.
        is_fused: whether everything between matrix products is fused, as in software of published figures.
    """

    work: EngineWork
    hardware: Hardware
    is_fused: bool = False
    _known: dict[BatchShape, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def at(
        self, phase: Phase, query_len: Any, num_shared_blocks: Any, num_unique_blocks: Any, num_logits: Any
    ) -> Any:
        """Seconds of a step, or of each of many when sizes are arrays that broadcast together."""
        sizes = (query_len, num_shared_blocks, num_unique_blocks, num_logits)
        shapes = Shapes(phase, *(size.astype(np.int64) if np.ndim(size) else int(size) for size in sizes))
        work = self.work.of(shapes)
        return predict_seconds(
            work.fused if self.is_fused else work, self.hardware, self.work.num_devices, FITTED
        ).total

    def __call__(self, shape: BatchShape) -> float:
        """Seconds of one step at ``shape``."""
        seconds = self._known.get(shape)
        if seconds is None:
            seconds = float(self.at(shape.phase, *shape.levels[3:]))
            if len(self._known) < _MOST_KNOWN:
                self._known[shape] = seconds
        return seconds
