"""Decode rows of a budget: the slot of the new token.

Shapes: N rows, K key/value heads, C slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bias_builders import leading_slots
from kernels_ref.groups.budget_slots import slot_to_write
from kernels_ref.groups.kv_policy import KVPolicy, SlotView
from kernels_ref.units import SlotState


class DecodeSlots(NamedTuple):
    """The slots of decode rows, once each has taken in its token.

    Attributes:
        slots: of all rows.
        written: slot of the new token in each head, int32 ``[N, K, 1]``.
    """

    slots: SlotView
    written: torch.Tensor


def take_in(
    policy: KVPolicy, state: SlotState, end: torch.Tensor, num_heads: int, num_slots: int
) -> DecodeSlots:
    """Give the new token of each decode row a slot.

    Args:
        state: of all units; those of decode rows come first.
        end: position behind the new token, 0 for rows without one, int32 ``[N]``.
    """
    position, score = (x[: len(end)].unflatten(1, (num_heads, num_slots)) for x in state)
    num_stored = torch.clamp(end - 1, min=0, max=num_slots)
    end_N11 = end[:, None, None]
    valid = leading_slots(num_stored, num_slots)[:, None]
    is_written = slot_to_write(policy, SlotView(score, position, valid, end_N11, num_slots), num_stored)
    number = torch.arange(num_slots, dtype=torch.int32, device=end.device)
    written = torch.where(is_written, number, 0).amax(dim=-1, keepdim=True)
    slots = SlotView(
        torch.where(is_written, 0.0, score),
        torch.where(is_written, end_N11 - 1, position),
        leading_slots(torch.clamp(end, max=num_slots), num_slots)[:, None],
        end_N11,
        num_slots,
    )
    return DecodeSlots(slots, written)
