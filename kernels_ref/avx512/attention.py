"""Attention of many bfloat16 queries: packed tiles, causal and streaming visibility, merged in place.

Scores, maxima, sums and outputs are float32; weights are rounded to bfloat16 as factors of the values.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from bias_builders import Window
from kernels_ref.avx512.library import load
from kernels_ref.partial import Partial

_LANES = 16
_MAX_DIM = 256
_ALIGNMENT_ITEMS = 32


def fits(q_SKGD: torch.Tensor, k_TKD: torch.Tensor) -> bool:
    """Whether ``attend`` can take these queries and keys, here."""
    dim = q_SKGD.shape[3]
    return (
        q_SKGD.dtype == torch.bfloat16
        and dim % _LANES == 0
        and dim <= _MAX_DIM
        and k_TKD.shape[2] == dim
        and _library() is not None
    )


def attend(
    total: Partial,
    q_SKGD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    *,
    is_causal: bool = False,
    window: Window | None = None,
) -> None:
    """Merge attention of scaled queries over some keys into ``total``, in place.

    Args:
        total: what the queries have seen so far, contiguous ``[S, K, G, D]`` and ``[S, K, G]``.
        is_causal: query ``s`` sees keys ``0..s`` only; there are as many keys as queries.
        window: with ``is_causal``, only the first ``sink`` and the last ``recent`` of those.

    Raises:
        ValueError: queries, keys and flags that do not go together.
    """
    num_queries, num_kv, group, dim = q_SKGD.shape
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
    library = _library()
    if library is None:
        raise ValueError("expected a CPU and a compiler that this kernel can use; ask fits() first")
    # The kernel reads runs of head_dim items.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_SKGD, k_TKD, v_TKD))
    items = library.hpu_duo_attend_workspace(num_keys, dim)
    workspace = torch.empty(items + _ALIGNMENT_ITEMS, dtype=torch.bfloat16)
    sink, recent = window or (0, 0)
    offset = 0 if is_causal else num_keys
    sizes = (num_queries, num_keys, num_kv, group, dim, offset, recent, sink)
    library.hpu_duo_attend(
        *(x.data_ptr() for x in (q, k, v, *total)),
        -(-workspace.data_ptr() // 64) * 64,
        (ctypes.c_int64 * 7)(*q.stride()[:3], *k.stride()[:2], *v.stride()[:2]),
        (ctypes.c_int * 8)(*sizes),
        torch.get_num_threads(),
    )


@cache
def _library() -> ctypes.CDLL | None:
    library = load("attention")
    if library is not None:
        library.hpu_duo_attend.argtypes = [ctypes.c_void_p] * 9 + [ctypes.c_int]
        library.hpu_duo_attend.restype = None
        library.hpu_duo_attend_workspace.restype = ctypes.c_int64
    return library
