"""Queries against one list of keys in portable torch, and gathered units as such a list.

Shapes: Q query tokens, T keys, X units, B slots, K key/value heads, G query heads of each, D head size.
"""

from __future__ import annotations

import torch

from kernels_ref.partial import Partial, attend
from kernels_ref.scoring import Scoring, soften


def as_keys(
    k_XKBD: torch.Tensor, v_XKBD: torch.Tensor, used_XB: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathered units as one list of keys and values ``[T, K, D]``; unused slots become zero."""
    keep = used_XB[:, None, :, None]
    k, v = torch.where(keep, k_XKBD, 0), torch.where(keep, v_XKBD, 0)
    return k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)


def attend_dense(
    q_QKGD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    visible_QT: torch.Tensor,
    scoring: Scoring,
) -> Partial:
    """Queries against one list of keys; the G heads of a group share a product.

    Args:
        visible_QT: the same for all key/value heads, or ``[K, Q, T]``.
    """
    num_queries, num_kv, group, dim = q_QKGD.shape
    q_KSD = q_QKGD.transpose(0, 1).reshape(num_kv, num_queries * group, dim)
    scores = soften(torch.matmul(q_KSD, k_TKD.permute(1, 2, 0)), scoring)
    partial = attend(
        scores.view(num_kv, num_queries, group, -1).flatten(1, 2),
        visible_QT.repeat_interleave(group, dim=-2) if group > 1 else visible_QT,
        v_TKD.transpose(0, 1),
    )
    return Partial(*(x.unflatten(1, (num_queries, group)).transpose(0, 1) for x in partial))
