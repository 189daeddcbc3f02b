"""Whole blocks of the unique part, added to what their owners have seen.

Shapes: N rows of up to M decoded tokens, X blocks, B slots of a block, K key/value heads, G query heads of
each, for all tokens of a row, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from kernels_ref.index import gather
from kernels_ref.partial import FLOOR, Partial, widened
from kernels_ref.scoring import Scoring, soften

AddBlocks: TypeAlias = Callable[[Partial, torch.Tensor, torch.Tensor, torch.Tensor], Partial]
"""``merge_by_owner``, or another one."""


def add_blocks(
    total: Partial,
    q_NKHD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    owner: torch.Tensor,
    scoring: Scoring,
    add: AddBlocks,
    visible_XMB: torch.Tensor | None = None,
) -> Partial:
    """Decode rows against one chunk of whole blocks.

    Args:
        visible_XMB: slots that each token of the owner sees; None = all, and ``add`` adds them.
    """
    query = gather(q_NKHD, torch.clamp(owner, max=q_NKHD.shape[0] - 1))
    scores = soften(torch.matmul(query, k_XKBD.transpose(2, 3)), scoring)
    if visible_XMB is None:
        return add(total, scores, v_XKBD, owner)
    of_heads = visible_XMB.repeat_interleave(q_NKHD.shape[2] // visible_XMB.shape[1], dim=1)
    return merge_by_owner(total, scores, v_XKBD, owner, of_heads[:, None])


def merge_by_owner(
    total: Partial,
    scores_XKGB: torch.Tensor,
    v_XKBD: torch.Tensor,
    owner: torch.Tensor,
    visible: torch.Tensor | None = None,
) -> Partial:
    """Add whole blocks to what their owners have seen so far.

    Weights are taken against the new largest score of the owner at once, so that the blocks need no
    partial of their own, which would take twice as many operators.

    Args:
        total: of the N rows.
        scores_XKGB: of each block with the query of its owner; overwritten.
        owner: row of each block, ``N`` = nobody, whose scores and values may be anything; int32 ``[X]``.
        visible: slots that queries see, broadcast against the scores; None = all.
    """
    if visible is not None:
        scores_XKGB = torch.where(visible, scores_XKGB, FLOOR)
    num_rows, num_kv, group, dim = total.attn.shape
    num_blocks = owner.shape[0]
    row = torch.arange(num_rows, dtype=owner.dtype, device=owner.device)
    member_NX = row[:, None] == owner[None]
    # A masked maximum over all pairs: [N, chunk, H] is small, and it is native everywhere.
    largest = widened(scores_XKGB.amax(dim=-1))
    block_max = torch.where(member_NX[..., None, None], largest[None], FLOOR)
    row_max = torch.maximum(total.max, block_max.amax(dim=1))
    owned = (owner < num_rows)[:, None, None]
    # Far above any score where nobody owns a block: its weights are 0, and no infinity meets its values.
    reference = torch.where(owned, gather(row_max, torch.clamp(owner, max=num_rows - 1)), -FLOOR)
    weights = scores_XKGB.sub_(reference[..., None].to(scores_XKGB.dtype)).exp_()
    if visible is not None:
        # A row that has seen nothing so far weighs hidden slots by exp(FLOOR - FLOOR) = 1.
        weights = torch.where(visible, weights, 0)
    # Selecting, not multiplying, keeps a NaN of somebody else's block out of the product.
    attn = torch.where(
        owned[..., None], torch.matmul(weights.to(v_XKBD.dtype), v_XKBD).to(largest.dtype), 0.0
    )
    sums = torch.where(owned, weights.sum(dim=-1, dtype=largest.dtype), 0.0)
    member = member_NX.to(attn.dtype)
    decay = torch.exp(total.max - row_max)
    return Partial(
        torch.addcmul(
            torch.matmul(member, attn.view(num_blocks, -1)).view(num_rows, num_kv, group, dim),
            total.attn,
            decay[..., None],
        ),
        row_max,
        torch.addcmul(
            torch.matmul(member, sums.view(num_blocks, -1)).view(num_rows, num_kv, group), total.sum, decay
        ),
    )
