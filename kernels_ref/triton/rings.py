"""Queries against the rings of their rows, for decodes and prompts."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.merging import merge_splits
from kernels_ref.triton.slot_shares import share_slots, slot_shares
from kernels_ref.triton.softmax import (
    FLOOR,
    accumulate,
    accumulate_stored,
    attend_run,
    attend_stored,
    load_queries,
    load_vectors,
    nothing_seen,
    score,
    score_stored,
    store_lines,
    store_partial,
)


class RingLaunch(NamedTuple):
    """Grid, results and sizes of a launch.

    Attributes:
        grid: heads, rows, ranges that each ring is cut into.
        parts: buffers for the triples of all ranges.
        sizes: arguments after ``parts``: rows, slots of a range, strides of the queries.
        constants: of the store, the heads and the tiles, by name, and the compiler's options.
    """

    grid: tuple[int, int, int]
    parts: launch.Triple
    sizes: tuple[int, ...]
    constants: dict[str, int | bool]


def plan_rings(q_NKGD: torch.Tensor, k_RKWD: torch.Tensor) -> RingLaunch:
    """Choose tiles and ranges for queries and a store of rings."""
    num_rows, num_heads, group, dim = q_NKGD.shape
    num_slots = k_RKWD.shape[2]
    limits = launch.device_limits(q_NKGD.device)
    chosen = launch.decode(group, dim, q_NKGD.dtype, limits, k_RKWD)
    tiles = launch.num_tiles(num_slots, chosen.keys)
    # With fewer tiles, a split costs more than it saves.
    splits = launch.num_splits(num_rows * num_heads, max(1, tiles // limits.tiles_of_a_split), limits)
    return RingLaunch(
        (num_heads, num_rows, splits),
        launch.partials(q_NKGD, splits * num_rows),
        (num_rows, launch.num_tiles(tiles, splits) * chosen.keys, *q_NKGD.stride()[:3]),
        {
            **launch.strides(k_RKWD),
            "SLOTS": num_slots,
            **chosen.constants(q_NKGD),
        },
    )


@triton.jit(do_not_specialize=["num_rows", "slots_per_split"])
def leading_rings_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_meta_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_meta_ptr: tl.tensor,
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
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(NUM_HEADS, N, splits)``: row ``n`` against the leading ``visible[n]`` slots of ring ``n``."""
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = tl.arange(0, M)
    acc, largest, total = nothing_seen(M, P)
    begin = split * slots_per_split
    end = tl.minimum(begin + slots_per_split, tl.load(visible_ptr + row))
    place = row.to(tl.int64) * stride_qn + head * stride_qk + group * stride_qg
    q = load_vectors(q_ptr, place, 1, group < GROUP, D, P, KEYS)
    acc, largest, total = attend_run(
        q, acc, largest, total, k_ptr, k_meta_ptr, v_ptr, v_meta_ptr, row, begin, end, head,
        UNIT, HEAD, SLOTS, D, P, T, KEYS, VALUES, SOFTCAP,
    )  # fmt: skip
    out = ((split.to(tl.int64) * num_rows + row) * NUM_HEADS + head) * GROUP + group
    store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, out, group < GROUP, D, P, VALUES)


def leading_rings(
    q_NKGD: torch.Tensor,
    k_RKWD: torch.Tensor,
    v_RKWD: torch.Tensor,
    visible: torch.Tensor,
    softcap: float,
    k_meta: torch.Tensor | None = None,
    v_meta: torch.Tensor | None = None,
    keys: int = 0,
    values: int = 0,
) -> launch.Triple:
    """Launch the kernel, and the merge where rings are cut.

    Args:
        visible: int32 ``[N, 1, 1]``.
        softcap: 0 = none.
    """
    plan = plan_rings(q_NKGD, k_RKWD)
    leading_rings_kernel[plan.grid](
        q_NKGD,
        *launch.pointers(k_RKWD, k_meta, v_RKWD, v_meta),
        visible,
        *plan.parts,
        *plan.sizes,
        **{**plan.constants, **launch.stored_constants(q_NKGD.shape[3], keys, values)},
        SOFTCAP=softcap,
    )
    return merge_splits(plan.parts, plan.grid[2])


@triton.jit(do_not_specialize=["num_rows", "slots_per_split"])
def held_rings_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_meta_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_meta_ptr: tl.tensor,
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
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SINK: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(NUM_HEADS, N, splits)``: the tokens of row ``n`` against ring ``n``."""
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = tl.arange(0, M)
    exists = group < GROUP
    place = row.to(tl.int64) * stride_qn + head * stride_qk + group * stride_qg
    q = load_vectors(q_ptr, place, 1, exists, D, P, KEYS)
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
        acc, largest, total = attend_stored(
            q, acc, largest, total, k_ptr, k_meta_ptr, v_ptr, v_meta_ptr, vector, seen, visible,
            D, P, KEYS, VALUES, SOFTCAP,
        )  # fmt: skip
    out = ((split.to(tl.int64) * num_rows + row) * NUM_HEADS + head) * GROUP + group
    store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, out, exists, D, P, VALUES)


def held_rings(
    q_NKHD: torch.Tensor,
    k_RKWD: torch.Tensor,
    v_RKWD: torch.Tensor,
    position: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    sink: int,
    softcap: float,
    k_meta: torch.Tensor | None = None,
    v_meta: torch.Tensor | None = None,
    keys: int = 0,
    values: int = 0,
) -> launch.Triple:
    """Launch the kernel, and the merge where rings are cut; see ``Held``, ``softcap`` 0 = none."""
    plan = plan_rings(q_NKHD, k_RKWD)
    held_rings_kernel[plan.grid](
        q_NKHD,
        *launch.pointers(k_RKWD, k_meta, v_RKWD, v_meta),
        position,
        begin,
        end,
        *plan.parts,
        *plan.sizes,
        position.stride(0),
        position.stride(1) if position.shape[1] > 1 else 0,
        **{**plan.constants, **launch.stored_constants(q_NKHD.shape[3], keys, values)},
        TOKENS=end.shape[1],
        SINK=sink,
        SOFTCAP=softcap,
    )
    return merge_splits(plan.parts, plan.grid[2])


@triton.jit(do_not_specialize=["num_rows", "slots_per_split"])
def rings_with_weights_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_meta_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_meta_ptr: tl.tensor,
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
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(NUM_HEADS, N, splits)``: row ``n`` against the leading ``visible[n]`` slots of ring ``n``.

    A program with a whole ring (``IS_WHOLE``) also writes the weights of its slots.
    """
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = tl.arange(0, M)
    place = row.to(tl.int64) * stride_qn + head * stride_qk + group * stride_qg
    q = load_vectors(q_ptr, place, 1, group < GROUP, D, P, KEYS)
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
        scores = score_stored(q, k_ptr, k_meta_ptr, vector, inside, D, P, KEYS, False, SOFTCAP)
        scores = tl.where(inside[None, :], scores, FLOOR)
        kept = (group < GROUP)[:, None] & inside[None, :]
        tl.store(own_scores + group[:, None] * SLOTS + slot[None, :], scores, mask=kept)
        acc, largest, total = accumulate_stored(
            scores, q, v_ptr, v_meta_ptr, vector, inside, acc, largest, total, D, P, VALUES, False
        )
    out = ((split.to(tl.int64) * num_rows + row) * NUM_HEADS + head) * GROUP + group
    store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, out, group < GROUP, D, P, VALUES)
    if IS_WHOLE:
        # Scores are read by other threads of the program than those that wrote them.
        tl.debug_barrier()
        share_slots(
            own_scores, mass_ptr + own * SLOTS, sinks_ptr + head * GROUP, largest, total, 0, SLOTS, visible,
            GROUP, SLOTS, M, WIDTH, HAS_SINKS, q_ptr.dtype.element_ty == tl.float32,
        )  # fmt: skip


def rings_with_weights(
    q_NKGD: torch.Tensor,
    k_RKWD: torch.Tensor,
    v_RKWD: torch.Tensor,
    visible: torch.Tensor,
    sinks_KG: torch.Tensor | None,
    softcap: float,
    k_meta: torch.Tensor | None = None,
    v_meta: torch.Tensor | None = None,
    keys: int = 0,
    values: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernel, and the merge where rings are cut.

    Args:
        visible: int32 ``[N, 1, 1]``.
        sinks_KG: logits that count in the weights, or None; the triple is without them.
        softcap: 0 = none.
    Returns:
        The triple, and the weight of each slot, float32 ``[N, K, W]``.
    """
    plan = plan_rings(q_NKGD, k_RKWD)
    splits, num_slots = plan.grid[2], k_RKWD.shape[2]
    scores = q_NKGD.new_empty((*q_NKGD.shape[:3], num_slots), dtype=torch.float32)
    mass = scores.new_empty((*q_NKGD.shape[:2], num_slots))
    rings_with_weights_kernel[plan.grid](
        q_NKGD,
        *launch.pointers(k_RKWD, k_meta, v_RKWD, v_meta),
        visible,
        visible if sinks_KG is None else sinks_KG,
        scores,
        mass,
        *plan.parts,
        *plan.sizes,
        **{**plan.constants, **launch.stored_constants(q_NKGD.shape[3], keys, values)},
        WIDTH=launch.shared_slots(),
        IS_WHOLE=splits == 1,
        HAS_SINKS=sinks_KG is not None,
        SOFTCAP=softcap,
    )
    if splits == 1:
        return *plan.parts, mass
    is_exact = q_NKGD.dtype == torch.float32
    return *slot_shares(scores, plan.parts, visible, sinks_KG, mass, is_exact=is_exact), mass


FAR = tl.constexpr(2**31 - 1)
"""A position that no token has."""


@triton.jit(do_not_specialize=["num_queries", "no_row", "num_rings"])
def shared_rings_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    row_ptr: tl.tensor,
    position_ptr: tl.tensor,
    row_start_ptr: tl.tensor,
    chunk_row_ptr: tl.tensor,
    chunk_position_ptr: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    num_queries: tl.tensor,
    no_row: tl.tensor,
    num_rings: tl.tensor,
    stride_qq: tl.tensor,
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
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(query tiles, NUM_HEADS)``.

    A tile of queries skips the rings of other rows, and all but the sinks of a ring out of its reach.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    q, line, query_row = load_queries(
        q_ptr, row_ptr, tile, head, num_queries, no_row, stride_qq, stride_qk, stride_qg, GROUP, D, P, M
    )
    query, takes_part = line // GROUP, query_row < no_row
    query_position = tl.load(position_ptr + query, mask=query < num_queries, other=0)
    acc, largest, total = nothing_seen(M, P)
    for ring in tl.range(0, num_rings):
        ring_row = tl.load(chunk_row_ptr + ring)
        owns = takes_part & (query_row == ring_row)
        # A ring's slots fill in order. Branches would cost registers, so skipping shortens the loop.
        num_stored = tl.load(row_start_ptr + tl.minimum(ring_row, no_row - 1))
        first_position = tl.min(tl.where(owns, query_position, FAR))
        end = tl.minimum(num_stored, tl.where(first_position - RECENT < num_stored - 1, SLOTS, SINK))
        end = tl.where(first_position < FAR, end, 0)
        for first in tl.range(0, end, T):
            slot = first + tl.arange(0, T)
            held = tl.load(chunk_position_ptr + ring * SLOTS + slot, mask=slot < SLOTS, other=-1)
            kept = (held < SINK)[None, :] | (held[None, :] > query_position[:, None] - RECENT)
            visible = owns[:, None] & (held >= 0)[None, :] & kept
            visible = visible & (held[None, :] <= query_position[:, None])
            vector = tl.cast(ring, tl.int64) * UNIT + head * HEAD + slot
            k = load_vectors(k_ptr, vector, D, held >= 0, D, P)
            v = load_vectors(v_ptr, vector, D, held >= 0, D, P)
            scores = tl.where(visible, score(q, k, SOFTCAP), FLOOR)
            acc, largest, total = accumulate(scores, v, acc, largest, total)
    store_lines(
        acc, largest, total, attn_ptr, max_ptr, sum_ptr, line, head, 0, num_queries,
        NUM_HEADS, GROUP, D, P,
    )  # fmt: skip


def shared_rings(
    q_QKGD: torch.Tensor,
    k_CKWD: torch.Tensor,
    v_CKWD: torch.Tensor,
    causal_row: torch.Tensor,
    positions: torch.Tensor,
    row_start: torch.Tensor,
    chunk_row: torch.Tensor,
    chunk_position: torch.Tensor,
    sink: int,
    recent: int,
    softcap: float,
) -> launch.Triple:
    """Launch the kernel; ``softcap`` 0 = none."""
    num_queries, num_heads, group, dim = q_QKGD.shape
    chosen = launch.prefill(dim, k_CKWD.dtype, launch.device_limits(q_QKGD.device)).for_lines(
        num_queries * group
    )
    out = launch.partials(q_QKGD, num_queries)
    shared_rings_kernel[(launch.num_tiles(num_queries * group, chosen.rows), num_heads)](
        q_QKGD,
        k_CKWD,
        v_CKWD,
        causal_row,
        positions,
        row_start,
        chunk_row,
        chunk_position,
        *out,
        num_queries,
        row_start.shape[0],
        chunk_row.shape[0],
        *q_QKGD.stride()[:3],
        **launch.strides(k_CKWD),
        **chosen.constants(q_QKGD),
        SLOTS=k_CKWD.shape[2],
        SINK=sink,
        RECENT=recent,
        SOFTCAP=softcap,
    )
    return out
