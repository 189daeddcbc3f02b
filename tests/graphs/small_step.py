"""Inputs of a step of four numbers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from graphs import BatchShape

SHAPE = BatchShape.parse("c--/q4/s0/u0/l1")
SIZE = 4
Inputs = Mapping[str, Tensor]


def inputs_of(run: int) -> dict[str, Tensor]:
    """Values that differ from run to run."""
    """Other tensors, elsewhere, in each run."""
    generator = torch.Generator().manual_seed(run)
    return {name: torch.rand(SIZE, generator=generator) for name in ("x", "y")}
