"""Decode rows of heads with a budget: attention with its weights, and the slot that is evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bias_builders import Leading, seen_mask
from kernels_ref.partial import FLOOR, SEEN, Partial, Scoring, soften

if TYPE_CHECKING:
    from kernels_ref.step import PartInputs, RingStep


def unique_with_weights(inputs: PartInputs, ring: RingStep) -> tuple[Partial, torch.Tensor]:
    """Attention of decode rows of one token to leading slots of their ring, with the weight of each slot.

    Sink logits take their share of the weights; the partial is without them.

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
    return weighed(q_NKGD, units.k[:num_rows], units.v[:num_rows], valid, scoring, sinks_KG)


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
    scores = soften(_products(q_NKGD, k_NKSD), scoring).float()
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


def _products(q_NKGD: torch.Tensor, k_NKSD: torch.Tensor) -> torch.Tensor:
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
