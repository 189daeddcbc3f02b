"""Attention of rows with one bfloat16 query token each, over the units of a store.

Every visible key and value is read once, from where it lies; hidden slots are not read at all, so what they
hold does not matter. Scores, weights and sums are float32.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from kernels_ref.avx512.library import load
from kernels_ref.partial import Partial

_PAIRS = 32
_MAX_DIM = 256
_Strides = ctypes.c_int64 * 9
_Sizes = ctypes.c_int * 6


def fits(q_NKGD: torch.Tensor, k_XKSD: torch.Tensor) -> bool:
    """Whether ``attend`` can take these queries and keys, here. Compiled code takes the answer as fixed."""
    dim = q_NKGD.shape[3]
    is_cpu_bfloat16 = q_NKGD.dtype == torch.bfloat16 == k_XKSD.dtype and q_NKGD.device.type == "cpu"
    return is_cpu_bfloat16 and dim % _PAIRS == 0 and dim <= _MAX_DIM and _is_available()


def attend(
    q_NKGD: torch.Tensor,
    k_XKSD: torch.Tensor,
    v_XKSD: torch.Tensor,
    owner: torch.Tensor,
    last: torch.Tensor,
    last_visible: torch.Tensor,
) -> Partial:
    """Scaled queries over whole units that they own, and the leading slots of one unit each.

    Args:
        owner: which row sees all of unit ``x``, int32 ``[<= X]``; other numbers than rows mean nobody.
        last, last_visible: for each row another unit and how many of its slots are seen, int32 ``[N]``.

    Raises:
        ValueError: stores that do not go with the queries, or no such kernel here.
    """
    num_rows, num_kv, group, dim = q_NKGD.shape
    num_units, _, num_slots, _ = k_XKSD.shape
    if k_XKSD.shape != (num_units, num_kv, num_slots, dim) or v_XKSD.shape != k_XKSD.shape:
        raise ValueError(
            f"expected stores [X, {num_kv}, S, {dim}], got {[*k_XKSD.shape]} and {[*v_XKSD.shape]}"
        )
    library = _library()
    if library is None:
        raise ValueError("expected a CPU and a compiler that this kernel can use; ask fits() first")
    # The kernel reads runs of head_dim items.
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q_NKGD, k_XKSD, v_XKSD))
    owner, last, last_visible = owner.contiguous(), last.contiguous(), last_visible.contiguous()
    attn = torch.empty((num_rows, num_kv, group, dim), dtype=torch.float32)
    largest, total = (torch.empty((num_rows, num_kv, group), dtype=torch.float32) for _ in range(2))
    library.hpu_duo_attend_rows(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        owner.data_ptr(),
        last.data_ptr(),
        last_visible.data_ptr(),
        attn.data_ptr(),
        largest.data_ptr(),
        total.data_ptr(),
        _Strides(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        _Sizes(num_rows, num_kv, group, dim, num_slots, len(owner)),
        torch.get_num_threads(),
    )
    return Partial(attn, largest, total)


@torch.compiler.assume_constant_result
def _is_available() -> bool:
    return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    library = load("rows")
    if library is not None:
        library.hpu_duo_attend_rows.argtypes = [ctypes.c_void_p] * 11 + [ctypes.c_int]
        library.hpu_duo_attend_rows.restype = None
    return library
