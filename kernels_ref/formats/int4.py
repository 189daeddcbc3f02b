"""4-bit integers with a scale and a zero for each vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels_ref.formats.base import VectorFormat, VectorPart
from kernels_ref.formats.scales import SCALE, as_scale, bounded

MOST_CODE = 15


@dataclass(frozen=True)
class Int4(VectorFormat):
    """Codes from 0 to 15, two a byte, and the scale and the zero of ``code * scale + zero``.

    The low half of byte ``i`` is the code of element ``i``, the high half that of element ``D / 2 + i``: both
    are unpacked as whole halves of a vector. Codes are those of the stored scale and zero.
    """

    num_parts: ClassVar[int] = 2

    def parts(self, dim: int) -> tuple[VectorPart, ...]:
        """Return the codes, and scale and zero.

        Raises:
            ValueError: ``dim`` is odd.
        """
        if dim % 2:
            raise ValueError(f"expected heads of an even size for keys or values of 4 bits, got {dim}")
        return VectorPart("codes", dim // 2, torch.uint8), VectorPart("meta", 2, SCALE)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Encode by the smallest and the largest element of each vector."""
        x = bounded(x)
        zero = x.amin(dim=-1, keepdim=True).to(SCALE)
        # Each is divided by itself: their difference may be infinite.
        scale = as_scale(x.amax(dim=-1, keepdim=True) / MOST_CODE - zero.float() / MOST_CODE)
        codes = torch.clamp(torch.round((x - zero.float()) / scale.float()), 0, MOST_CODE)
        low, high = codes.to(torch.uint8).chunk(2, dim=-1)
        return low | (high << 4), torch.cat([scale, zero], dim=-1)

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return codes times scale and the zero, rounded once."""
        packed, meta = parts
        scale, zero = meta.float().split(1, dim=-1)
        codes = torch.cat([packed & MOST_CODE, packed >> 4], dim=-1).float()
        return torch.addcmul(zero, codes, scale).to(dtype)
