"""Attention of decode rows that see their first slots from another place than the others.

Shapes: N rows, K key/value heads, G query heads of each, S slots, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bias_builders import Leading, seen_mask
from kernels_ref.partial import FLOOR, SEEN, Partial
from kernels_ref.scoring import Scoring, soften
from kernels_ref.units import KVUnits

if TYPE_CHECKING:
    from kernels_ref.groups import RingStep


def unique_placed(
    q_NKGD: torch.Tensor,
    placed_NKGD: torch.Tensor,
    num_placed: int,
    units: KVUnits,
    ring: RingStep,
    scoring: Scoring,
) -> Partial:
    """Decode rows of one token against their slots, ``placed`` queries against the first ``num_placed``.

    Args:
        ring: ``seen`` says how many leading slots a row sees; the others may hold anything.
    """
    assert isinstance(ring.seen, Leading), "slots of a budget are seen from the first one on"
    num_rows, num_slots = len(q_NKGD), units.layout.num_slots
    k_NKSD, v_NKSD = units.k[:num_rows], units.v[:num_rows]
    valid_N1S = seen_mask(ring.seen, num_slots)[:, :, 0]
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
