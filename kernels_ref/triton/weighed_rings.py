"""Decodes against the leading slots of their own rings, with what each slot receives of their attention.

The loop over keys leaves its scores behind, a number for each query head and slot where keys and values have
hundreds. Once the largest one and the sum are known, scores become weights, which are summed over the query
heads of a key: in the same program, or, where rings are cut, in the launch that merges.

Shapes: N rows, K heads, G query heads of each, D head size, W slots of a ring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.ring_launch import plan_rings
from kernels_ref.triton.slot_shares import share_slots, slot_shares
from kernels_ref.triton.softmax import FLOOR, accumulate, load_vectors, nothing_seen, score, store_partial


@triton.jit(do_not_specialize=["num_rows", "slots_per_split"])
def weighed_rings_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    mass_ptr: tl.tensor,
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
    WIDTH: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(NUM_HEADS, N, splits)``: row ``n`` against the leading ``visible[n]`` slots of ring ``n``.

    A program that has a ring whole (``IS_WHOLE``) ends with what its slots receive.
    """
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = tl.arange(0, M)
    place = row.to(tl.int64) * stride_qn + head * stride_qk + group * stride_qg
    q = load_vectors(q_ptr, place, 1, group < GROUP, D, P)
    acc, largest, total = nothing_seen(M, P)
    visible = tl.load(visible_ptr + row)
    begin = split * slots_per_split
    end = tl.minimum(begin + slots_per_split, visible)
    own = row.to(tl.int64) * NUM_HEADS + head
    own_scores = scores_ptr + own * GROUP * SLOTS
    for start in tl.range(begin, end, T):
        slot = start + tl.arange(0, T)
        inside = slot < end
        vector = row.to(tl.int64) * UNIT + head * HEAD + slot
        k = load_vectors(k_ptr, vector, D, inside, D, P)
        scores = tl.where(inside[None, :], score(q, k, SOFTCAP), FLOOR)
        kept = (group < GROUP)[:, None] & inside[None, :]
        tl.store(own_scores + group[:, None] * SLOTS + slot[None, :], scores, mask=kept)
        v = load_vectors(v_ptr, vector, D, inside, D, P)
        acc, largest, total = accumulate(scores, v, acc, largest, total)
    out = ((split.to(tl.int64) * num_rows + row) * NUM_HEADS + head) * GROUP + group
    store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, out, group < GROUP, D, P)
    if IS_WHOLE:
        # Scores are read by other threads of the program than those that wrote them.
        tl.debug_barrier()
        share_slots(
            own_scores, mass_ptr + own * SLOTS, sinks_ptr + head * GROUP, largest, total, 0, SLOTS, visible,
            GROUP, SLOTS, M, WIDTH, HAS_SINKS, k_ptr.dtype.element_ty == tl.float32,
        )  # fmt: skip


def weighed_rings(
    q_NKGD: torch.Tensor,
    k_RKWD: torch.Tensor,
    v_RKWD: torch.Tensor,
    visible: torch.Tensor,
    sinks_KG: torch.Tensor | None,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernel, and the merge where rings are cut.

    Args:
        visible: int32 ``[N, 1, 1]``.
        sinks_KG: logits that take their share of the weights, or None; the triple is without them.
        softcap: 0 = none.
    Returns:
        The triple, and what each slot receives, float32 ``[N, K, W]``.
    """
    plan = plan_rings(q_NKGD, k_RKWD)
    splits, num_slots = plan.grid[2], k_RKWD.shape[2]
    scores = q_NKGD.new_empty((*q_NKGD.shape[:3], num_slots), dtype=torch.float32)
    mass = scores.new_empty((*q_NKGD.shape[:2], num_slots))
    weighed_rings_kernel[plan.grid](
        q_NKGD,
        k_RKWD,
        v_RKWD,
        visible,
        visible if sinks_KG is None else sinks_KG,
        scores,
        mass,
        *plan.parts,
        *plan.sizes,
        **plan.constants,
        WIDTH=launch.shared_slots(),
        IS_WHOLE=splits == 1,
        HAS_SINKS=sinks_KG is not None,
        SOFTCAP=softcap,
    )
    if splits == 1:
        return *plan.parts, mass
    is_exact = k_RKWD.dtype == torch.float32
    return *slot_shares(scores, plan.parts, visible, sinks_KG, mass, is_exact=is_exact), mass
