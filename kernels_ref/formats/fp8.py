"""8-bit floats of four bits of exponent, with a constant scale or one for each vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels_ref.formats.base import VectorFormat, VectorPart
from kernels_ref.formats.scales import SCALE, as_scale, bounded

LARGEST = 448.0
"""Of float8_e4m3fn."""


def _codes(x: torch.Tensor, largest: float = LARGEST) -> torch.Tensor:
    # Bytes: torch's CPU kernels copy no float8 by index.
    return torch.clamp(x, -largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)


_TABLE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The value of each code."""


def _values(codes: torch.Tensor) -> torch.Tensor:
    if codes.device.type == "cpu":
        # Torch's conversion there takes six times as long.
        return _TABLE.index_select(0, codes.flatten().int()).view(codes.shape)
    return codes.view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class Fp8(VectorFormat):
    """Elements as they are, in 8 bits; those beyond the largest number are stored as that.

    Attributes:
        largest: number of the device.
    """

    takes_scale: ClassVar[bool] = True
    largest: float = LARGEST

    def parts(self, dim: int) -> tuple[VectorPart, ...]:
        """Return the codes."""
        return (VectorPart("codes", dim, torch.uint8),)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Round each element."""
        return (_codes(x.float(), self.largest),)

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the elements, which every dtype has exactly."""
        return _values(parts[0]).to(dtype)


@dataclass(frozen=True)
class ScaledFp8(VectorFormat):
    """Elements in 8 bits, divided by a scale so that the largest of a vector is the largest number.

    Attributes:
        largest: number of the device.
    """

    num_parts: ClassVar[int] = 2
    largest: float = LARGEST

    def parts(self, dim: int) -> tuple[VectorPart, ...]:
        """Return the codes and the scale."""
        return VectorPart("codes", dim, torch.uint8), VectorPart("scale", 1, SCALE)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Encode by the largest magnitude of each vector."""
        x = bounded(x)
        scale = as_scale(x.abs().amax(dim=-1, keepdim=True) / self.largest)
        return _codes(x / scale.float(), self.largest), scale

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return codes times scale, rounded once."""
        codes, scale = parts
        return (_values(codes) * scale.float()).to(dtype)
