"""Figures of Gaudi 2 and Gaudi 3 from public sources."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_GIB = 1 << 30


class Format(Enum):
    """Format in which numbers are stored and multiplied."""

    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element; scales of fp8 are not counted."""
        return 2 if self is Format.BF16 else 1

    @classmethod
    def parse(cls, text: str) -> Format:
        """The format of a name; ValueError for any but bf16 (or bfloat16) and fp8."""
        name = text.strip().lower()
        for known in cls:
            if name == known.value or (known is cls.BF16 and name == "bfloat16"):
                return known
        raise ValueError(f"expected the format bf16 or fp8, got {text!r}")


@dataclass(frozen=True)
class Hardware:
    """One accelerator, and its place in a box of ``max_devices``.

    Rates are per second and device. None of them was measured by this project.

    Attributes:
        name: on the command line.
        title: for reports.
        nominal_bf16, nominal_fp8: dense matrix operations, as the vendor states them.
        reached_bf16, reached_fp8: best published rates of large products; the roofs of the cost model.
        vector_ops: bf16 operations of the vector engine.
        memory_bytes: device memory that start-up logs show as usable.
        memory_bytes_per_s: of device memory, as the vendor states it.
        pair_bytes_per_s: between two devices of a box, in one direction.
        max_devices: in one box.
        sources: of the figures.
    """

    name: str
    title: str
    nominal_bf16: float
    nominal_fp8: float
    reached_bf16: float
    reached_fp8: float
    vector_ops: float
    memory_bytes: int
    memory_bytes_per_s: float
    pair_bytes_per_s: float
    max_devices: int
    sources: tuple[str, ...]

    def check_devices(self, num_devices: int) -> None:
        """Raise ValueError unless one box has that many devices."""
        if not 1 <= num_devices <= self.max_devices:
            raise ValueError(f"expected 1 to {self.max_devices} {self.title} devices, got {num_devices}")


GAUDI2 = Hardware(
    name="gaudi2",
    title="Gaudi 2",
    nominal_bf16=432e12,
    nominal_fp8=865e12,
    reached_bf16=418.7e12,
    reached_fp8=826.5e12,
    vector_ops=11e12,
    memory_bytes=round(94.62 * _GIB),
    memory_bytes_per_s=2.46e12,
    pair_bytes_per_s=37.5e9,
    max_devices=8,
    sources=(
        "nominal operations, memory bandwidth: Intel, Gaudi 2 white paper",
        "reached operations: stas00/ml-engineering, compute/accelerator, MAMF table",
        "vector engine: arXiv 2501.00210",
        "usable memory: start-up log in the documentation of vllm-gaudi",
        "links: 21 of 24 ports of 100 Gbit/s, three to each of seven peers",
    ),
)

GAUDI3 = Hardware(
    name="gaudi3",
    title="Gaudi 3",
    nominal_bf16=1835e12,
    nominal_fp8=1835e12,
    reached_bf16=1243e12,
    reached_fp8=1289.5e12,
    vector_ops=28.7e12,
    memory_bytes=round(126.5 * _GIB),
    memory_bytes_per_s=3.7e12,
    pair_bytes_per_s=75e9,
    max_devices=8,
    sources=(
        "nominal operations, vector engine, memory bandwidth: Intel, Gaudi 3 white paper and Hot Chips 2024",
        "reached operations: stas00/ml-engineering, compute/accelerator, MAMF table",
        "usable memory: vllm-project/vllm-gaudi pull request 1736",
        "links: 21 of 24 ports of 200 Gbit/s, three to each of seven peers",
    ),
)

_BY_NAME = {hardware.name: hardware for hardware in (GAUDI2, GAUDI3)}
HARDWARE_NAMES = tuple(_BY_NAME)


def find_hardware(name: str) -> Hardware:
    """The accelerator of that name; ValueError when it is unknown."""
    if name not in _BY_NAME:
        raise ValueError(f"expected hardware {' or '.join(HARDWARE_NAMES)}, got {name!r}")
    return _BY_NAME[name]
