"""Allocation of the slots of a budget: which tokens are evicted, and the slot of each new token.

Shapes: N decode rows, P prompt rows, K key/value heads, C slots, T new tokens of a prompt row, S = C + T.
Values are sorted, never indices, so that no int64 arises; no index is negative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from bias_builders import highest
from kernels_ref.budgets import eviction_victims, ranks
from kernels_ref.groups.kv_policy import KVPolicy, SlotView
from kernels_ref.partial import FLOOR

_LAST = 1 << 30
"""Above any position."""

FirstToGo: TypeAlias = Callable[[torch.Tensor | None, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""``kernels_ref.budgets``, or another implementation of it."""


def priorities(policy: KVPolicy, slots: SlotView) -> torch.Tensor:
    """Rank of each token, float32 ``[X, K, S]``: the lowest is evicted first; ``FLOOR`` without a token."""
    return torch.where(slots.valid, ranks(slots.score, policy.protects(slots)), FLOOR)


def slot_to_write(
    policy: KVPolicy,
    slots: SlotView,
    num_stored: torch.Tensor,
    eviction_victims: FirstToGo = eviction_victims,
) -> torch.Tensor:
    """Find the slot of each head for the next token of a row, int32 ``[N, K]``.

    The first free one; in a full store that of the eviction victim.

    Args:
        slots: before the token is stored; ``end`` counts it.
        num_stored: occupied slots, int32 ``[N]``; occupied ones come first.
        eviction_victims: of the implementation.
    """
    # In a full store every slot is valid; in another one the victim is not used.
    score = slots.score if policy.has_scores else None
    given_up = eviction_victims(score, slots.position, policy.protects(slots))
    num_stored = num_stored[:, None]
    return torch.where(num_stored == slots.num_slots, given_up, num_stored)


def kept_tokens(policy: KVPolicy, slots: SlotView) -> torch.Tensor:
    """Mark the ``num_slots`` tokens to retain, of more: bool ``[P, K, S]``.

    Those of the highest rank; of equal ranks the latest.
    """
    return highest(priorities(policy, slots), slots.position, slots.valid, slots.num_slots)


class Moves(NamedTuple):
    """Places of the tokens that remain after a chunk.

    Attributes:
        slot: of each new token, ``C`` for evicted ones, int32 ``[P, K, T]``.
        source: index of the new token that each slot gets, ``T`` if it is unchanged, int32 ``[P, K, C]``.
    """

    slot: torch.Tensor
    source: torch.Tensor


def assign_slots(keeps_old: torch.Tensor, keeps_new: torch.Tensor) -> Moves:
    """Assign the retained new tokens to the free slots, in the order of both.

    Args:
        keeps_old: slots with retained tokens, bool ``[P, K, C]``.
        keeps_new: retained new tokens, bool ``[P, K, T]``; no more than there are free slots.
    """
    num_slots, num_new = keeps_old.shape[-1], keeps_new.shape[-1]
    free, free_rank = _numbered(~keeps_old)
    taken, new_rank = _numbered(keeps_new)
    num_taken = keeps_new.sum(dim=-1, keepdim=True, dtype=torch.int32)
    slot = torch.where(keeps_new, look_up(free, new_rank), num_slots)
    is_filled = ~keeps_old & (free_rank < num_taken)
    return Moves(slot, torch.where(is_filled, look_up(taken, free_rank), num_new))


def text_order(position: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Order of the slots of each row and head by position, slots without a token last.

    Args:
        position: int32 ``[X, K, S]``.
        valid: whether there is a token, bool, broadcast against the positions.

    Returns:
        The slots in this order, and the rank of each slot in it, int32 ``[X, K, S]``.
    """
    order = torch.sort(torch.where(valid, position, _LAST), dim=-1, stable=True).indices.to(torch.int32)
    return order, torch.sort(order, dim=-1).indices.to(torch.int32)


def look_up(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Values by number within each row and head.

    Args:
        values: ``[P, K, n]``.
        index: int32 ``[P, K, m]``, 0 or more; clamped to the last one.
    """
    size = values.shape[-1]
    index = torch.clamp(index, max=size - 1)
    lines = values.shape[0] * values.shape[1]
    start = torch.arange(0, lines * size, size, dtype=torch.int32, device=values.device)
    flat = (start[:, None] + index.reshape(lines, -1)).view(-1)
    return values.reshape(-1).index_select(0, flat).view(index.shape)


def _numbered(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the chosen entries, in order, followed by others, and the rank of each of them."""
    size = chosen.shape[-1]
    number = torch.arange(size, dtype=torch.int32, device=chosen.device)
    in_order = torch.sort(torch.where(chosen, number, size), dim=-1).values
    rank = torch.cumsum(chosen.to(torch.int32), dim=-1, dtype=torch.int32) - 1
    return in_order, torch.clamp(rank, min=0)
