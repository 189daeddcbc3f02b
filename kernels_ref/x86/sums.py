"""Sums of attention weights by key, of bfloat16 queries whose log-sum-exp is known.

A second product of queries and keys; weights are float32, and nothing but their sums is held.

Shapes: S queries, T keys, K key/value heads, G query heads of each, D head size.
"""

from __future__ import annotations

import torch

from kernels_ref.x86.attention import fits
from kernels_ref.x86.library import Instructions, require

__all__ = ["column_sums", "fits"]


def column_sums(
    q_SKGD: torch.Tensor,
    k_TKD: torch.Tensor,
    lse_SKG: torch.Tensor,
    *,
    offset: int | None = None,
    instructions: Instructions = "best",
) -> torch.Tensor:
    """Weights that scaled queries put on each key, float32 ``[K, T]``, summed over queries and query heads.

    Args:
        lse_SKG: log-sum-exp of the scores of each query, float32.
        offset: query ``s`` sees keys up to ``s + offset``; None = all keys.

    Raises:
        ValueError: tensors that do not go together, or no such kernel here.
    """
    require()
    return torch.ops.hpu_duo_x86.column_sums.default(q_SKGD, k_TKD, lse_SKG, offset, instructions)
