"""Roofline: conversion of work to seconds, and the range in which a prediction is expected to lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpu_duo.planning.model import Format, Hardware
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

ERROR_FACTORS = {Format.FP8: 1.37, Format.BF16: 1.9}
"""The most that a predicted time is off by, either way, by format, rounded up.

fp8: the worst of the held-out rows. bf16: no row of it is held out, so it is treated as unseen: the worst of
all rows when the other models alone were fitted (``worst_unseen``).
"""


@dataclass(frozen=True)
class Prediction:
    """A prediction: ``low <= value <= high``.

    For a time, ``value`` assumes that everything between matrix products is fused, as in the software of the
    published figures. ``low`` is ``value`` divided by the largest error of the model. ``high`` assumes that
    nothing is fused, as ``hpu-duo audit`` counts, and is multiplied by that error. For a rate, the two bounds
    change places.
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, work: Work, hardware: Hardware, num_devices: int, error_factor: float) -> Prediction:
        """Predict the seconds of a step.

        Args:
            error_factor: 1 or more.

        Raises:
            ValueError: one box has fewer devices.
        """
        fused = predict_seconds(work.fused, hardware, num_devices, FITTED).total
        unfused = predict_seconds(work, hardware, num_devices, FITTED).total
        return cls(fused, fused / error_factor, unfused * error_factor)

    @classmethod
    def total(cls, parts: Iterable[Prediction]) -> Prediction:
        """Seconds of steps that follow each other."""
        values = [(each.value, each.low, each.high) for each in parts]
        return cls(*(sum(column) for column in zip(*values)))

    def rate(self, num: int) -> Prediction:
        """Return the rate, per second, of ``num`` items in this total time."""
        return Prediction(num / self.value, num / self.high, num / self.low)

    @property
    def range(self) -> tuple[float, float]:
        """The bounds."""
        return self.low, self.high
