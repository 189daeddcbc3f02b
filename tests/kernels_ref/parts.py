"""Inputs of single parts, for tests that have no whole step."""

from __future__ import annotations

from typing import Any

import torch

from kernels_ref.partial import Scoring
from kernels_ref.step import PartInputs


def inputs_of(
    q: torch.Tensor,
    *,
    new: Any = None,
    units: Any = None,
    tensors: Any = None,
    softcap: Any = None,
    **rest: Any,
) -> PartInputs:
    """Inputs of a part that reads no more than these."""
    return PartInputs(q, new, units, tensors, Scoring(softcap), **rest)
