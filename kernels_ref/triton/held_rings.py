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
from kernels_ref.triton.softmax import FLOOR, accumulate, load_vectors, score, store_partial


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
    acc = tl.zeros([M, P], dtype=tl.float32)
    largest = tl.full([M], FLOOR, dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
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
    num_rows, num_heads, group, dim = q_NKHD.shape
    num_slots = k_RKWD.shape[2]
    limits = launch.device_limits(q_NKHD.device)
    chosen = launch.decode(group, dim, k_RKWD.dtype, limits)
    tiles = launch.num_tiles(num_slots, chosen.keys)
    splits = launch.num_splits(num_rows * num_heads, max(1, tiles // limits.tiles_of_a_split), limits)
    parts = launch.partials(q_NKHD, splits * num_rows)
    held_rings_kernel[(num_heads, num_rows, splits)](
        q_NKHD,
        k_RKWD,
        v_RKWD,
        position,
        begin,
        end,
        *parts,
        num_rows,
        launch.num_tiles(tiles, splits) * chosen.keys,
        *q_NKHD.stride()[:3],
        position.stride(0),
        position.stride(1) if position.shape[1] > 1 else 0,
        **launch.strides(k_RKWD),
        NUM_HEADS=num_heads,
        GROUP=group,
        TOKENS=end.shape[1],
        SLOTS=num_slots,
        D=dim,
        P=launch.padded_dim(dim),
        M=chosen.rows,
        T=chosen.keys,
        SINK=sink,
        SOFTCAP=softcap,
        **chosen.options,
    )
    return merge_splits(parts, splits)
