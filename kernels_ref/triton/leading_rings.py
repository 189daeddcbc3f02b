"""Decodes against the leading slots of their own rings, which lie at the front of the ring store.

Shapes: N rows, K heads, G query heads of each, D head size, W slots of a ring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.merge_splits import merge_splits
from kernels_ref.triton.ring_launch import plan_rings
from kernels_ref.triton.softmax import attend_run, load_vectors, nothing_seen, store_partial


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
    acc, largest, total = nothing_seen(M, P)
    begin = split * slots_per_split
    end = tl.minimum(begin + slots_per_split, tl.load(visible_ptr + row))
    place = row.to(tl.int64) * stride_qn + head * stride_qk + group * stride_qg
    q = load_vectors(q_ptr, place, 1, group < GROUP, D, P)
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
    """Launch the kernel, and the merge where rings are cut.

    Args:
        visible: int32 ``[N, 1, 1]``.
        softcap: 0 = none.
    """
    plan = plan_rings(q_NKGD, k_RKWD)
    leading_rings_kernel[plan.grid](
        q_NKGD,
        k_RKWD,
        v_RKWD,
        visible,
        *plan.parts,
        *plan.sizes,
        **plan.constants,
        SOFTCAP=softcap,
    )
    return merge_splits(plan.parts, plan.grid[2])
