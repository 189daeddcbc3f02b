"""Allocation of the slots of a budget: which tokens are evicted, and the slot of each new token.

Shapes: N decode rows, P prompt rows, K key/value heads, C slots, T new tokens of a prompt row, S = C + T.
Values are sorted, never indices, so that no int64 arises; no index is negative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from bias_builders import Leading, highest, seen_mask
from kernels_ref.groups.kv_policy import KVPolicy, SlotView
from kernels_ref.partial import FLOOR, SEEN, Partial, Scoring, soften

if TYPE_CHECKING:
    from kernels_ref.step import PartInputs, RingStep


def unique_with_weights(inputs: PartInputs, ring: RingStep) -> tuple[Partial, torch.Tensor]:
    """Attention of decode rows of one token to leading slots of their ring, with the weight of each slot.

    Sink logits count in the weights; the partial is without them.

    Args:
        ring: ``seen`` is the number of leading slots that a row sees.

    Returns:
        The partial, and the weights of each slot summed over the query heads of its key, float32
        ``[N, K, S]``; 0 for slots that are not seen.
    """
    q_NKGD, _, units, _, scoring, _, sinks_KG = inputs
    num_rows, num_slots = len(q_NKGD), units.layout.num_slots
    assert isinstance(ring.seen, Leading), "expected leading slots of a budget to be visible"
    valid = seen_mask(ring.seen, num_slots)[:, :, 0]
    return weighed(q_NKGD, *units.tile(slice(0, num_rows)), valid, scoring, sinks_KG)


def weighed(
    q_NKGD: torch.Tensor,
    k_NKSD: torch.Tensor,
    v_NKSD: torch.Tensor,
    valid_N1S: torch.Tensor | None,
    scoring: Scoring,
    sinks_KG: torch.Tensor | None,
) -> tuple[Partial, torch.Tensor]:
    """See ``unique_with_weights``.

    Args:
        valid_N1S: slots that a row sees; None = all of them, in all rows.
    """
    scores = soften(scores_of(q_NKGD, k_NKSD), scoring).float()
    if valid_N1S is not None:
        scores = torch.where(valid_N1S[:, :, None], scores, FLOOR)
        # Hidden slots have undefined content.
        v_NKSD = torch.where(valid_N1S[..., None], v_NKSD, 0)
    largest = scores.amax(dim=-1)
    weights = torch.exp(scores - largest[..., None])
    sees_any = largest > SEEN
    total = torch.where(sees_any, weights.sum(dim=-1), 0.0)
    attn = torch.matmul(weights.to(v_NKSD.dtype), v_NKSD).float()
    partial = Partial(torch.where(sees_any[..., None], attn, 0.0), largest, total)
    whole = total if sinks_KG is None else total + torch.exp(sinks_KG.float() - largest)
    share = torch.where(sees_any, 1.0 / torch.where(sees_any, whole, 1.0), 0.0)
    return partial, torch.matmul(share[:, :, None], weights)[:, :, 0]


def scores_of(q_NKGD: torch.Tensor, k_NKSD: torch.Tensor) -> torch.Tensor:
    """Scores of queries ``[N, K, G, D]`` and keys ``[N, K, S, D]``, precise on a CPU: ``[N, K, G, S]``."""
    if q_NKGD.device.type != "cpu" or q_NKGD.dtype == torch.float32:
        return torch.matmul(q_NKGD, k_NKSD.transpose(2, 3))
    # Scores rounded to bfloat16 change weights by 2 %. Row by row, the float32 keys stay in a CPU cache.
    rows = [torch.matmul(q.float(), k.float().transpose(1, 2)) for q, k in zip(q_NKGD, k_NKSD)]
    return torch.stack(rows)


_BEYOND = 1 << 30
"""Above any position."""


def eviction_victims(
    score_NKC: torch.Tensor | None, position_NKC: torch.Tensor, is_protected: torch.Tensor | None
) -> torch.Tensor:
    """Find the eviction victims: the unprotected slot with the lowest score, ties by lowest position.

    Args:
        score_NKC: float32, finite and of magnitudes below 1e30; None = all are equal.
        position_NKC: int32, 0 or more and below 2^30.
        is_protected: bool, broadcast against the positions; None = any slot may be evicted. Fewer than C of a
            row and head.

    Returns:
        int32 ``[N, K]``.
    """
    passed_over = is_protected
    if score_NKC is not None:
        rank = ranks(score_NKC, is_protected)
        passed_over = rank != rank.amin(dim=-1, keepdim=True)
    position = position_NKC
    if passed_over is not None:
        position = torch.add(position, passed_over, alpha=_BEYOND)
    return position.argmin(dim=-1).to(torch.int32)


def ranks(score: torch.Tensor, is_protected: torch.Tensor | None) -> torch.Tensor:
    """Return scores, with those of protected slots above all others."""
    # Sums instead of ``where``: on a CPU they need a twentieth of its time.
    return score if is_protected is None else torch.add(score, is_protected, alpha=-FLOOR)


_LAST = 1 << 30
"""Above any position."""

FirstToGo: TypeAlias = Callable[[torch.Tensor | None, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""``kernels_ref.groups.budget_slots``, or another implementation of it."""


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
