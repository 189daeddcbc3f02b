"""Decodes against rings whose slots hold any positions: each query sees an interval of them, and the sinks.

Shapes: N rows of up to M tokens, K heads, G query heads of each, H = M * G for all tokens of a row, D head
size, W slots of a ring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.merge_splits import merge_splits
from kernels_ref.triton.ring_launch import plan_rings
from kernels_ref.triton.softmax import FLOOR, accumulate, load_vectors, nothing_seen, score, store_partial


@triton.jit(do_not_specialize=["num_rows", "slots_per_split"])
def held_rings_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    position_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    num_rows: tl.tensor,
    slots_per_split: tl.tensor,
    stride_qn: tl.tensor,
    stride_qk: tl.tensor,
    stride_qg: tl.tensor,
    stride_pn: tl.tensor,
    stride_pk: tl.tensor,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
    SINK: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(NUM_HEADS, N, splits)``: the tokens of row ``n`` against ring ``n``."""
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = tl.arange(0, M)
    exists = group < GROUP
    place = row.to(tl.int64) * stride_qn + head * stride_qk + group * stride_qg
    q = load_vectors(q_ptr, place, 1, exists, D, P)
    token = row * TOKENS + group // (GROUP // TOKENS)
    begin = tl.load(begin_ptr + token, mask=exists, other=0)
    end = tl.load(end_ptr + token, mask=exists, other=0)
    acc, largest, total = nothing_seen(M, P)
    first = split * slots_per_split
    last = tl.minimum(first + slots_per_split, tl.where(tl.max(end) > 0, SLOTS, 0))
    for start in tl.range(first, last, T):
        slot = start + tl.arange(0, T)
        held_ptr = position_ptr + row * stride_pn + head * stride_pk + slot
        held = tl.load(held_ptr, mask=slot < last, other=-1)[None, :]
        visible = (held >= 0) & (held < end[:, None]) & ((held >= begin[:, None]) | (held < SINK))
        seen = tl.max(visible.to(tl.int32), 0) > 0
        vector = row.to(tl.int64) * UNIT + head * HEAD + slot
        k = load_vectors(k_ptr, vector, D, seen, D, P)
        v = load_vectors(v_ptr, vector, D, seen, D, P)
        scores = tl.where(visible, score(q, k, SOFTCAP), FLOOR)
        acc, largest, total = accumulate(scores, v, acc, largest, total)
    out = ((split.to(tl.int64) * num_rows + row) * NUM_HEADS + head) * GROUP + group
    store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, out, exists, D, P)


def held_rings(
    q_NKHD: torch.Tensor,
    k_RKWD: torch.Tensor,
    v_RKWD: torch.Tensor,
    position: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    sink: int,
    softcap: float,
) -> launch.Triple:
    """Launch the kernel, and the merge where rings are cut; see ``Held``, ``softcap`` 0 = none."""
    plan = plan_rings(q_NKHD, k_RKWD)
    held_rings_kernel[plan.grid](
        q_NKHD,
        k_RKWD,
        v_RKWD,
        position,
        begin,
        end,
        *plan.parts,
        *plan.sizes,
        position.stride(0),
        position.stride(1) if position.shape[1] > 1 else 0,
        **plan.constants,
        TOKENS=end.shape[1],
        SINK=sink,
        SOFTCAP=softcap,
    )
    return merge_splits(plan.parts, plan.grid[2])
