"""Roofline: convert work to seconds."""

from __future__ import annotations

from dataclasses import dataclass

from hpu_duo.cost.hardware import Hardware
from hpu_duo.cost.work import Work


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
    """Time of a step in parts, which follow each other without overlap."""

    compute: float
    memory: float
    link: float
    launch: float

    @property
    def total(self) -> float:
        """Time in all."""
        return self.compute + self.memory + self.link + self.launch


def roof_seconds(work: Work, hardware: Hardware, num_devices: int) -> Seconds:
    """Time at full efficiency; ``launch`` is the number of operators, to be multiplied by seconds.

    Devices share operations and bytes evenly. An all-reduce sends ``2 * (n - 1) / n`` of the bytes from
    each device over its ``n - 1`` links; what is sent besides goes over one link each.

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
    )


def predict_seconds(work: Work, hardware: Hardware, num_devices: int, efficiency: Efficiency) -> Seconds:
    """Time at an efficiency; ValueError when one box has fewer devices."""
    roof = roof_seconds(work, hardware, num_devices)
    return Seconds(
        compute=roof.compute / efficiency.compute,
        memory=roof.memory / efficiency.memory,
        link=roof.link / efficiency.link,
        launch=roof.launch * efficiency.launch_s,
    )
