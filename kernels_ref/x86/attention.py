"""Attention of many bfloat16 queries over units of a store: packed tiles, and sums of its weights by key."""

from __future__ import annotations

import torch

from bias_builders import Window
from kernels_ref.partial import Partial
from kernels_ref.x86.library import Instructions, is_available, require

_LANES = 16
_MAX_DIM = 256


def fits(q_SKGD: torch.Tensor, k_TKD: torch.Tensor) -> bool:
    """Whether ``attend`` supports these queries and keys on this machine."""
    dim = q_SKGD.shape[3]
    return (
        q_SKGD.dtype == torch.bfloat16
        and dim % _LANES == 0
        and dim <= _MAX_DIM
        and k_TKD.shape[2] == dim
        and is_available()
    )


def attend(
    total: Partial,
    q_SKGD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    *,
    is_causal: bool = False,
    window: Window | None = None,
    instructions: Instructions = "best",
) -> None:
    """Merge attention of scaled queries over some keys into ``total``, in place.

    Args:
        total: partial of the queries so far, contiguous ``[S, K, G, D]`` and ``[S, K, G]``.
        is_causal: query ``s`` sees keys ``0..s`` only; there are as many keys as queries.
        window: with ``is_causal``, only the first ``sink`` and the last ``recent`` of those.

    Raises:
        ValueError: queries, keys and flags that do not go together, or no such kernel here.
    """
    num_queries, num_kv, _, dim = q_SKGD.shape
    num_keys = k_TKD.shape[0]
    if k_TKD.shape != (num_keys, num_kv, dim) or v_TKD.shape != k_TKD.shape:
        raise ValueError(
            f"expected keys and values [T, {num_kv}, {dim}], got {[*k_TKD.shape]} and {[*v_TKD.shape]}"
        )
    if (is_causal and num_keys != num_queries) or (window is not None and not is_causal):
        raise ValueError(
            f"expected a window only with is_causal, and then as many keys as queries, "
            f"got {window=}, {is_causal=}, {num_queries} queries and {num_keys} keys"
        )
    if not all(part.is_contiguous() for part in total):
        raise ValueError("expected a contiguous partial to merge into")
    require()
    sink, recent = window or (0, 0)
    torch.ops.hpu_duo_x86.attend.default(*total, q_SKGD, k_TKD, v_TKD, is_causal, sink, recent, instructions)


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
