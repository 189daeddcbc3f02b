"""Scales of vectors: bfloat16, which has the range of float32, so that no finite vector overflows."""

from __future__ import annotations

import torch

SCALE = torch.bfloat16
"""The dtype of scales and zeros."""
SMALLEST = 2.0**-126
"""The smallest normal scale; that of a vector of zeros."""
LARGEST = 2.0**126
"""The largest magnitude that is stored, so that no product with a rounded scale overflows."""


def bounded(x: torch.Tensor) -> torch.Tensor:
    """Return vectors in float32, at most ``LARGEST``: infinities too; a NaN stays one."""
    return torch.clamp(x.float(), -LARGEST, LARGEST)


def as_scale(x: torch.Tensor) -> torch.Tensor:
    """Return scales as they are stored, never 0. That of a vector with a NaN is NaN, and so is all of it."""
    return torch.clamp(x, min=SMALLEST).to(SCALE)
