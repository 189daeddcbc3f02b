"""Tokens of prompt rows against the new keys of their own row that a rule shows.

As ``kernels_ref.triton.causal``, but each tile of keys comes with its mask, and is not read if that is empty.

Shapes: Q tokens, K heads, G query heads of each, D head size; a tile has M rows, each a query head of a
token, ordered by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.query_tiles import load_queries, store_lines
from kernels_ref.triton.rules import attend_seen, program, sees
from kernels_ref.triton.softmax import nothing_seen


@triton.jit(do_not_specialize=["num_queries", "no_row"])
def ruled_causal_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    row_ptr: tl.tensor,
    position_ptr: tl.tensor,
    row_query_start_ptr: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    num_queries: tl.tensor,
    no_row: tl.tensor,
    stride_qq: tl.tensor,
    stride_qk: tl.tensor,
    stride_qg: tl.tensor,
    stride_kq: tl.tensor,
    stride_kk: tl.tensor,
    stride_vq: tl.tensor,
    stride_vk: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
    RULE: tl.constexpr,
    LEAVES: tl.constexpr,
    SKIPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(query tiles, NUM_HEADS)``. Heavy tiles, the last, start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    q, line, query_row = load_queries(
        q_ptr, row_ptr, tile, head, num_queries, no_row, stride_qq, stride_qk, stride_qg, GROUP, D, P, M
    )
    query, takes_part = line // GROUP, query_row < no_row
    query_position = tl.load(position_ptr + query, mask=query < num_queries, other=0)
    # No key that is loaded has row -2, so a query that takes no part sees none.
    seeing_row = tl.where(takes_part, query_row, -2)
    k_head, v_head = k_ptr + head * stride_kk, v_ptr + head * stride_vk
    acc, largest, total = nothing_seen(M, P)

    first = tl.min(tl.where(takes_part, query, num_queries))
    last = tl.max(tl.where(takes_part, query, -1))
    if first <= last:
        begin = tl.load(row_query_start_ptr + tl.load(row_ptr + first))
        for start in tl.range(begin, last + 1, T):
            token = start + tl.arange(0, T)
            inside = token < last + 1
            key_row = tl.load(row_ptr + token, mask=inside, other=-1)
            key_position = tl.load(position_ptr + token, mask=inside, other=0)
            visible = seeing_row[:, None] == key_row[None, :]
            visible = visible & sees(query_position, key_position, RULE, LEAVES)
            acc, largest, total = attend_seen(
                q, acc, largest, total, k_head, v_head, token.to(tl.int64), stride_kq, stride_vq, visible,
                D, P, SKIPS, SOFTCAP,
            )  # fmt: skip
    store_lines(
        acc, largest, total, attn_ptr, max_ptr, sum_ptr, line, head, 0, num_queries,
        NUM_HEADS, GROUP, D, P,
    )  # fmt: skip


def ruled_causal(
    q_QKGD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    causal_row: torch.Tensor,
    positions: torch.Tensor,
    row_query_start: torch.Tensor,
    rule: Sequence[int],
    softcap: float,
) -> launch.Triple:
    """Launch the kernel; ``rule`` in numbers, ``softcap`` 0 = none."""
    num_queries, num_heads, group, dim = q_QKGD.shape
    tiles = launch.ruled(dim, k_QKD.dtype, launch.device_limits(q_QKGD.device))
    out = launch.partials(q_QKGD, num_queries)
    ruled_causal_kernel[(launch.num_tiles(num_queries * group, tiles.rows), num_heads)](
        q_QKGD,
        k_QKD,
        v_QKD,
        causal_row,
        positions,
        row_query_start,
        *out,
        num_queries,
        row_query_start.shape[0],
        *q_QKGD.stride()[:3],
        *k_QKD.stride()[:2],
        *v_QKD.stride()[:2],
        **tiles.constants(q_QKGD),
        SOFTCAP=softcap,
        **program(rule, k_QKD.dtype, dim),
    )
    return out
