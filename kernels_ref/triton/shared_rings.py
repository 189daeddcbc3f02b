"""Tokens of prompt rows against what their ring held before the step.

Shapes: Q tokens, K heads, G query heads of each, D head size, C rings of W slots in the scratch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.query_tiles import load_queries, store_lines
from kernels_ref.triton.softmax import FLOOR, accumulate, load_vectors, nothing_seen, score

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
        # A ring's slots fill in order. Branches would cost registers, so what is skipped ends the loop early.
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
