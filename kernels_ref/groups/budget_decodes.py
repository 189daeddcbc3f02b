"""Decode rows of a budget: the slot of the new token, and the state behind it.

Shapes: N rows, X units, K key/value heads, C slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bias_builders import leading_slots
from kernels_ref.groups.budget_slots import FirstToGo, slot_to_write
from kernels_ref.groups.kv_policy import KVPolicy, SlotView
from kernels_ref.index import index_dtype
from kernels_ref.units import SlotState, UnitLayout


class DecodeSlots(NamedTuple):
    """The slots of decode rows, once each has taken in its token.

    Attributes:
        slots: of all rows; positions and scores are those of the store.
        written: slot of the new token in each head, int32 ``[N, K, 1]``.
    """

    slots: SlotView
    written: torch.Tensor


def take_in(
    policy: KVPolicy,
    state: SlotState,
    layout: UnitLayout,
    end: torch.Tensor,
    unit: torch.Tensor,
    first_to_go: FirstToGo,
    token_class: torch.Tensor,
) -> DecodeSlots:
    """Give the new token of each decode row a slot, and write its position and first score there.

    Args:
        state: of all units, those of decode rows first; written in place.
        end: position behind the new token, 0 for rows without one, int32 ``[N]``.
        unit: unit of each row, the trash for rows without a token, int32 ``[N]``.
        first_to_go: of the implementation.
        token_class: of each row's new token, int32 ``[N]``, for policies that mark tokens; any, for others.
    """
    num_heads, num_slots = layout.num_heads, layout.num_slots
    shape = (num_heads, num_slots)
    num_stored = torch.clamp(end - 1, min=0, max=num_slots)
    valid = leading_slots(num_stored, num_slots)[:, None]
    before = _view(state, shape, valid, end)
    written = slot_to_write(policy, before, num_stored, first_to_go)
    dtype = index_dtype(end.device)
    head = torch.arange(0, num_heads * num_slots, num_slots, dtype=dtype, device=end.device)
    place = (unit.to(dtype)[:, None] * (num_heads * num_slots) + head + written).view(-1)
    state.position.view(-1).index_copy_(0, place, (end - 1).repeat_interleave(num_heads))
    if policy.has_scores:
        first = policy.first_score(token_class).repeat_interleave(num_heads)
        state.score.view(-1).index_copy_(0, place, first)
    valid = leading_slots(torch.clamp(end, max=num_slots), num_slots)[:, None]
    return DecodeSlots(_view(state, shape, valid, end), written[..., None])


def _view(state: SlotState, shape: tuple[int, int], valid: torch.Tensor, end: torch.Tensor) -> SlotView:
    position, score = (x[: len(end)].unflatten(1, shape) for x in state)
    return SlotView(score, position, valid, end[:, None, None], shape[1])
