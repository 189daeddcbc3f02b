"""Decodes against the leading slots of their own rings, which lie at the front of the ring store.

Shapes: N rows, K heads, G query heads of each, D head size, W slots of a ring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.merge_splits import merge_splits
from kernels_ref.triton.softmax import FLOOR, attend_run, load_vectors, store_partial


@triton.jit(do_not_specialize=["num_rows", "slots_per_split"])
def leading_rings_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    num_rows: tl.tensor,
    slots_per_split: tl.tensor,
    stride_qn: tl.tensor,
    stride_qk: tl.tensor,
    stride_qg: tl.tensor,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(NUM_HEADS, N, splits)``: row ``n`` against the leading ``visible[n]`` slots of ring ``n``."""
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = tl.arange(0, M)
    place = row.to(tl.int64) * stride_qn + head * stride_qk + group * stride_qg
    q = load_vectors(q_ptr, place, 1, group < GROUP, D, P)
    acc = tl.zeros([M, P], dtype=tl.float32)
    largest = tl.full([M], FLOOR, dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    begin = split * slots_per_split
    end = tl.minimum(begin + slots_per_split, tl.load(visible_ptr + row))
    acc, largest, total = attend_run(
        q, acc, largest, total, k_ptr, v_ptr, row, begin, end, head, UNIT, HEAD, SLOTS, D, P, T, SOFTCAP
    )
    out = ((split.to(tl.int64) * num_rows + row) * NUM_HEADS + head) * GROUP + group
    store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, out, group < GROUP, D, P)


def leading_rings(
    q_NKGD: torch.Tensor,
    k_RKWD: torch.Tensor,
    v_RKWD: torch.Tensor,
    visible: torch.Tensor,
    softcap: float,
) -> launch.Triple:
    """Launch the kernel, and the merge where rings are cut; ``visible [N, 1, 1]``, ``softcap`` 0 = none."""
    num_rows, num_heads, group, dim = q_NKGD.shape
    num_slots = k_RKWD.shape[2]
    limits = launch.device_limits(q_NKGD.device)
    chosen = launch.decode(group, dim, k_RKWD.dtype, limits)
    tiles = launch.num_tiles(num_slots, chosen.keys)
    # A split of fewer tiles is over before the merge that it costs has begun.
    splits = launch.num_splits(num_rows * num_heads, max(1, tiles // limits.tiles_of_a_split), limits)
    parts = launch.partials(q_NKGD, splits * num_rows)
    leading_rings_kernel[(num_heads, num_rows, splits)](
        q_NKGD,
        k_RKWD,
        v_RKWD,
        visible,
        *parts,
        num_rows,
        launch.num_tiles(tiles, splits) * chosen.keys,
        *q_NKGD.stride()[:3],
        **launch.strides(k_RKWD),
        NUM_HEADS=num_heads,
        GROUP=group,
        SLOTS=num_slots,
        D=dim,
        P=launch.padded_dim(dim),
        M=chosen.rows,
        T=chosen.keys,
        SOFTCAP=softcap,
        **chosen.options,
    )
    return merge_splits(parts, splits)
