"""Attention of decode rows that also tells the weights: the portable part for heads with a budget.

Shapes: N rows, K key/value heads, G query heads of each, S slots of a ring, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bias_builders import Leading, seen_mask
from kernels_ref.partial import FLOOR, SEEN, Partial
from kernels_ref.scoring import Scoring, soften
from kernels_ref.units import KVUnits

if TYPE_CHECKING:
    from kernels_ref.step import RingStep


def unique_weighed(
    q_NKGD: torch.Tensor,
    units: KVUnits,
    ring: RingStep,
    scoring: Scoring,
    sinks_KG: torch.Tensor | None,
) -> tuple[Partial, torch.Tensor]:
    """Decode rows of one token against leading slots of their ring, and what each slot receives.

    Args:
        ring: ``seen`` says how many leading slots a row sees.
        sinks_KG: attention-sink logits, which take their share of the weights; the partial is without them.

    Returns:
        The partial, and the weights of each slot summed over the query heads of its key, float32
        ``[N, K, S]``; 0 for slots that are not seen.
    """
    num_rows, num_slots = len(q_NKGD), units.layout.num_slots
    assert isinstance(ring.seen, Leading), "slots of a budget are seen from the first one on"
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
    """See ``unique_weighed``.

    Args:
        valid_N1S: slots that a row sees; None = all of them, in all rows.
    """
    scores = soften(_products(q_NKGD, k_NKSD), scoring).float()
    if valid_N1S is not None:
        scores = torch.where(valid_N1S[:, :, None], scores, FLOOR)
        # Slots that are not seen may hold anything.
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
    # Scores rounded to bfloat16 put weights off by 2 %. One row at a time, the widened keys stay in a cache.
    rows = [torch.matmul(q.float(), k.float().transpose(1, 2)) for q, k in zip(q_NKGD, k_NKSD)]
    return torch.stack(rows)
