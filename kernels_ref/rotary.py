"""Rotary embedding of vectors by given frequencies, in the layout of rotated halves.

Shapes: D head size, F frequencies, at most D / 2; elements after the first 2 * F are not rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Turn(NamedTuple):
    """Rotations, or means of rotations.

    Attributes:
        cos, sin: of each frequency, float32 ``[..., F]``.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, index: torch.Tensor) -> Turn:
        """Return entries of dimension 0."""
        return Turn(self.cos.index_select(0, index), self.sin.index_select(0, index))

    def of_heads(self, num_dims: int) -> Turn:
        """Return the same for vectors with ``num_dims`` more dimensions before the last one."""
        for _ in range(num_dims):
            self = Turn(self.cos[..., None, :], self.sin[..., None, :])
        return self


def turns(position: torch.Tensor, frequencies: Sequence[float]) -> Turn:
    """Rotations to positions, which may be negative.

    Args:
        position: int32 ``[...]``.
        frequencies: radians for each position.
    """
    # Created by an operator, since a captured step copies nothing from the host.
    numbers = [position.new_full((1,), each, dtype=torch.float32) for each in frequencies]
    angle = position.float()[..., None] * torch.cat(numbers)
    return Turn(torch.cos(angle), torch.sin(angle))


def composed(first: Turn, second: Turn) -> Turn:
    """Compose two rotations."""
    return Turn(
        first.cos * second.cos - first.sin * second.sin, first.sin * second.cos + first.cos * second.sin
    )


def turned(x: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Rotate vectors ``[..., D]``, float32; dimensions before the last are broadcast."""
    half = turn.cos.shape[-1]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    # The rest has the same shape before the last dimension, whatever is broadcast.
    return torch.cat(
        [first * turn.cos - second * turn.sin, second * turn.cos + first * turn.sin, rest], dim=-1
    )
