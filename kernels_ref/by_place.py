"""Attention of decode rows that see their first slots from another place than the others.

Shapes: N rows, K key/value heads, G query heads of each, S slots, D head size.
"""

from __future__ import annotations

import torch

from kernels_ref.partial import FLOOR, SEEN, Partial
from kernels_ref.scoring import Scoring, soften


def attend_by_place(
    q_NKGD: torch.Tensor,
    placed_NKGD: torch.Tensor,
    num_placed: int,
    kv_NKSD: tuple[torch.Tensor, torch.Tensor],
    valid_N1S: torch.Tensor,
    scoring: Scoring,
) -> Partial:
    """Decode rows of one token against their slots, ``placed`` queries against the first ``num_placed``.

    Args:
        valid_N1S: slots that a row sees; the others may hold anything.
    """
    k_NKSD, v_NKSD = kv_NKSD
    placed = torch.matmul(placed_NKGD, k_NKSD[:, :, :num_placed].transpose(2, 3))
    others = torch.matmul(q_NKGD, k_NKSD[:, :, num_placed:].transpose(2, 3))
    scores = soften(torch.cat([placed, others], dim=-1), scoring).float()
    scores = torch.where(valid_N1S[:, :, None], scores, FLOOR)
    largest = scores.amax(dim=-1)
    sees_any = largest > SEEN
    weights = torch.exp(scores - largest[..., None])
    v_NKSD = torch.where(valid_N1S[..., None], v_NKSD, 0)
    attn = torch.matmul(weights.to(v_NKSD.dtype), v_NKSD).float()
    total = torch.where(sees_any, weights.sum(dim=-1), 0.0)
    return Partial(torch.where(sees_any[..., None], attn, 0.0), largest, total)
