"""Torch's fused CPU attention as a partial."""

from __future__ import annotations

import torch

from kernels_ref.partial import FLOOR, Partial


def flash(
    q_SKGD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    *,
    is_causal: bool = False,
    visible: torch.Tensor | None = None,
) -> Partial:
    """Fused attention of scaled queries; normalised, so its sum is 1 and its max the log-sum-exp."""
    group = q_SKGD.shape[2]
    bias = None
    if visible is not None:
        # The kernel adds the bias in the dtype of the queries; float16 ends before our floor.
        lowest = max(FLOOR, torch.finfo(q_SKGD.dtype).min)
        bias = torch.zeros(visible.shape, dtype=q_SKGD.dtype).masked_fill_(~visible, lowest)[None, None]
    # Groups are the batch, over the same keys: with fewer key heads, torch 2.7 reads out of bounds.
    out_GKSD, lse_GKS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_SKGD.permute(2, 1, 0, 3),
        k_TKD.transpose(0, 1).expand(group, -1, -1, -1),
        v_TKD.transpose(0, 1).expand(group, -1, -1, -1),
        0.0,
        is_causal,
        attn_mask=bias,
        scale=1.0,
    )
    attn = out_GKSD.permute(2, 1, 0, 3).contiguous().float()
    largest = lse_GKS.permute(2, 1, 0).contiguous().float()
    total = torch.ones_like(largest)
    if visible is not None:
        # The result of a row without any visible key is made of hidden keys.
        sees_any = visible.any(dim=1)[:, None, None]
        attn = torch.where(sees_any[..., None], attn, 0.0)
        largest = torch.where(sees_any, largest, FLOOR)
        total = torch.where(sees_any, total, 0.0)
    return Partial(attn, largest, total)
