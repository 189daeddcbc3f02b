"""Roofline: conversion of work to seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphs import BatchShape, Phase
from hpu_duo.planning.attention_counts import Shapes
from hpu_duo.planning.engine_work import EngineWork
from hpu_duo.planning.model import Hardware
from hpu_duo.planning.work import Work


@dataclass(frozen=True)
class Efficiency:
    """Shares of the hardware's roofs that software reaches.

    Attributes:
        compute: share of matrix and vector operations, 0 to 1.
        memory: share of memory bandwidth, 0 to 1.
        link: share of the links between devices, 0 to 1.
        launch_s: further seconds of each operator, whatever its size.
    """

    compute: float
    memory: float
    link: float
    launch_s: float

    def __post_init__(self) -> None:
        for name in ("compute", "memory", "link"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"expected {name} above 0 and at most 1, got {getattr(self, name)}")
        if self.launch_s < 0.0:
            raise ValueError(f"expected launch_s >= 0, got {self.launch_s}")


@dataclass(frozen=True)
class Seconds:
    """Time of a step in parts, which follow each other without overlap; arrays for the work of many steps."""

    compute: Any
    memory: Any
    link: Any
    launch: Any
    host: Any = 0.0

    @property
    def total(self) -> Any:
        """Time in all."""
        return self.compute + self.memory + self.link + self.launch + self.host


REGION_CALL_S = 18e-6
"""Seconds of the host to call one compiled region.

Measured on a CPU core: 22 µs for a function of ``torch.compile`` with nine tensors, of which 4 are its
operators; the rest is guards and dispatch. The launch of a Gaudi's recipe comes on top; no figure of it is
published.
"""


def roof_seconds(work: Work, hardware: Hardware, num_devices: int) -> Seconds:
    """Time at full efficiency; ``launch`` is the number of operators, to be multiplied by seconds.

    Devices share operations and bytes evenly. An all-reduce sends ``2 * (n - 1) / n`` of the bytes from each
    device over its ``n - 1`` links; other data uses one link each.

    Raises:
        ValueError: one box has fewer devices.
    """
    hardware.check_devices(num_devices)
    matrix = work.bf16_ops / hardware.reached_bf16 + work.fp8_ops / hardware.reached_fp8
    vector = work.vector_ops / hardware.vector_ops
    memory = work.num_bytes / hardware.memory_bytes_per_s
    sent = 0.0 if num_devices == 1 else 2.0 * work.reduced_bytes / num_devices + work.sent_bytes
    return Seconds(
        compute=(matrix + vector) / num_devices,
        memory=memory / num_devices,
        link=sent / hardware.pair_bytes_per_s,
        launch=work.num_launches,
        host=work.num_region_calls * REGION_CALL_S,
    )


def predict_seconds(work: Work, hardware: Hardware, num_devices: int, efficiency: Efficiency) -> Seconds:
    """Time at an efficiency; ValueError when one box has fewer devices."""
    roof = roof_seconds(work, hardware, num_devices)
    return Seconds(
        compute=roof.compute / efficiency.compute,
        memory=roof.memory / efficiency.memory,
        link=roof.link / efficiency.link,
        launch=roof.launch * efficiency.launch_s,
        host=roof.host,
    )


FITTED = Efficiency(compute=0.748, memory=0.865, link=0.749, launch_s=0.68e-6)
"""``fit`` of the first half of ``split_rows(published_rows())``, rounded to three digits.

The second half had no part in it. One set serves both Gaudis: the roofs of ``Hardware`` carry the difference.
"""


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
