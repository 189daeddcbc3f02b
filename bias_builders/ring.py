"""Where the tokens of a streaming head lie in its ring, and what each slot holds.

A ring has ``sink + recent`` slots. Slots ``[0, sink)`` hold the first tokens for ever; the rest
is written round and round. Slots therefore fill in order, and once ``n`` tokens are stored, the
leading ``min(n, size)`` slots are in use. The position held by a slot follows from ``n`` alone,
so no table of positions is stored or copied to the device.
"""

from __future__ import annotations

import torch

from bias_builders.rules import Window


def ring_slot(position: torch.Tensor, window: Window) -> torch.Tensor:
    """Slot that stores a token, same shape and integer type as ``position``."""
    turning = window.sink + torch.remainder(position - window.sink, window.recent)
    return torch.where(position < window.sink, position, turning)


def stays_in_ring(position: torch.Tensor, end: torch.Tensor, window: Window) -> torch.Tensor:
    """Whether a token is still held once all tokens before position ``end`` are stored."""
    return (position < window.sink) | (position >= end - window.recent)


def slot_position(num_stored: torch.Tensor, window: Window) -> torch.Tensor:
    """Position of the token that each slot holds, -1 where the slot is empty.

    Args:
        num_stored: tokens stored so far, integer ``[R]``.
    Returns:
        integer ``[R, size]``. For comparison only, never an index.
    """
    slot = torch.arange(window.size, dtype=num_stored.dtype, device=num_stored.device)
    last = num_stored[:, None] - 1
    turns_back = torch.remainder(last - slot[None, :], window.recent)
    position = torch.where(slot[None, :] < window.sink, slot[None, :], last - turns_back)
    # An empty slot of the turning part would compute a position inside the sinks or before 0.
    is_used = slot[None, :] < torch.clamp(num_stored, max=window.size)[:, None]
    return torch.where(is_used, position, -1)
