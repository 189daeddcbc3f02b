"""Symmetric 8-bit integers with a scale for each vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels_ref.formats.base import VectorFormat, VectorPart
from kernels_ref.formats.scales import SCALE, as_scale, bounded

MOST_CODE = 127


@dataclass(frozen=True)
class Int8(VectorFormat):
    """Codes from -127 to 127, and the scale that they are multiples of.

    Codes are those of the stored scale, so each element is off by at most half of it.
    """

    num_parts: ClassVar[int] = 2

    def parts(self, dim: int) -> tuple[VectorPart, ...]:
        """Return the codes and the scale."""
        return VectorPart("codes", dim, torch.int8), VectorPart("scale", 1, SCALE)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Encode by the largest magnitude of each vector."""
        x = bounded(x)
        scale = as_scale(x.abs().amax(dim=-1, keepdim=True) / MOST_CODE)
        codes = torch.clamp(torch.round(x / scale.float()), -MOST_CODE, MOST_CODE)
        return codes.to(torch.int8), scale

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return codes times scale, rounded once."""
        codes, scale = parts
        return (codes.float() * scale.float()).to(dtype)
