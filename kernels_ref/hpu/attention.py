"""Fused attention as partial triples.

Shapes: as in ``kernels_ref.reference``.
"""

from __future__ import annotations

import torch

from kernels_ref.partial import FLOOR, Partial
from kernels_ref.scoring import Softmax


def attend_dense(
    q_QKGD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    visible_QT: torch.Tensor,
    softmax: Softmax,
    inverse_scale: float,
) -> Partial:
    """Queries against one list of keys, whose scores are never in memory.

    The operator returns normalised attention, the largest score and the inverse of the sum: a triple whose
    sum is 1 and whose max is the log-sum-exp.

    Args:
        q_QKGD: scaled.
        k_TKD, v_TKD: finite also where nobody sees them.
        inverse_scale: see ``FusedOperators``.

    Source: vllm-gaudi, ``SlicedFusedSDPA``, which passes a mask also where causality would do, because the
    operator's causal form returns other statistics.
    """
    hidden = _hidden(q_QKGD.dtype)
    mask_QT = torch.where(visible_QT, q_QKGD.new_zeros(()), hidden)
    # [1, K, G, Q, D] and [1, K, 1, T, D]: keys are broadcast to the queries of a group.
    out, largest, inverse, _ = torch.ops.hpu.sdpa_recomp_fwd(
        q_QKGD.permute(1, 2, 0, 3).contiguous()[None],
        k_TKD.transpose(0, 1).contiguous()[None, :, None],
        v_TKD.transpose(0, 1).contiguous()[None, :, None],
        mask_QT[None, None, None],
        0.0,
        1.0,
        False,
        True,
        "fast" if softmax is Softmax.FAST else "None",
        None,
        "right",
    )
    attn, largest, inverse = (x[0].movedim(2, 0).float() for x in (out, largest, inverse))
    largest, inverse = largest[..., 0], inverse[..., 0]
    # A query that sees no key has weighed hidden ones.
    sees_any = largest > hidden / 2
    log_sum = largest - torch.log(inverse * inverse_scale)
    return Partial(
        torch.where(sees_any[..., None], attn, 0.0).contiguous(),
        torch.where(sees_any, log_sum, FLOOR).contiguous(),
        torch.where(sees_any, 1.0, 0.0),
    )


def _hidden(dtype: torch.dtype) -> float:
    """A number that hides a key when it is added to its score: finite, and so is the sum."""
    return max(FLOOR, torch.finfo(dtype).min / 2)
