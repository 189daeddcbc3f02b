"""Slots of the tokens of a streaming head in its ring, and positions of the slots.

A ring has ``sink + recent + slack`` slots. Slots ``[0, sink)`` store the first tokens for ever; the rest is a
ring buffer. Slots therefore fill in order, and once ``n`` tokens are stored, the leading ``min(n, size)``
slots are in use. The position in a slot is a function of ``n``, so no table of positions is stored or copied
to the device.

With slack a ring stores more tokens than a window shows, so the last ``slack`` tokens can be rolled back by a
smaller number of stored tokens. Slots written since then count as their previous tokens, which no later token
sees.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bias_builders.rules import Window


class Ring(NamedTuple):
    """The slots in which a streaming head stores its tokens.

    Attributes:
        window: the window of a token.
        slack: further slots, hence tokens that can be rolled back.
    """

    window: Window
    slack: int = 0

    @property
    def size(self) -> int:
        """Number of slots."""
        return self.window.size + self.slack

    @property
    def turning(self) -> int:
        """Slots of the ring buffer, without sinks."""
        return self.window.recent + self.slack


def ring_slot(position: torch.Tensor, ring: Ring) -> torch.Tensor:
    """Slot that stores a token, same shape and integer type as ``position``."""
    sink = ring.window.sink
    return torch.where(position < sink, position, sink + torch.remainder(position - sink, ring.turning))


def stays_in_ring(position: torch.Tensor, end: torch.Tensor, ring: Ring) -> torch.Tensor:
    """Whether a token is still stored after all tokens before position ``end`` are."""
    return (position < ring.window.sink) | (position >= end - ring.turning)


def slot_position(num_stored: torch.Tensor, ring: Ring) -> torch.Tensor:
    """Position of the token in each slot, -1 where the slot is empty.

    Args:
        num_stored: tokens stored so far, integer ``[R]``.
    Returns:
        integer ``[R, size]``. For comparison only, never an index.
    """
    slot = torch.arange(ring.size, dtype=num_stored.dtype, device=num_stored.device)
    last = num_stored[:, None] - 1
    turns_back = torch.remainder(last - slot[None, :], ring.turning)
    position = torch.where(slot[None, :] < ring.window.sink, slot[None, :], last - turns_back)
    # An empty slot of the ring buffer would get a position inside the sinks or before 0.
    is_used = slot[None, :] < torch.clamp(num_stored, max=ring.size)[:, None]
    return torch.where(is_used, position, -1)
