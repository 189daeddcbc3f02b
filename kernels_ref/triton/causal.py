"""Tokens of prompt rows against the new keys of their own row.

Tokens of a row are contiguous in the flat batch, so the keys that a tile of queries can see are one range:
from the beginning of the first query's row to the last query. Earlier rows are skipped. With a window the
range begins at the band of the first query, and the sink tokens before the band, which only the first query's
row can have, are a second, short range. Inside the range, tiles of keys that all queries see are not masked.

Shapes: Q tokens, K heads, G query heads of each, D head size; a tile has M rows, each a query head of a
token, ordered by token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.softmax import (
    FLOOR,
    accumulate,
    load_all_vectors,
    load_queries,
    load_vectors,
    nothing_seen,
    score,
    store_lines,
    without,
)


@triton.jit
def _attend_masked(
    q: tl.tensor,
    acc: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    row_ptr: tl.tensor,
    position_ptr: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    query_row: tl.tensor,
    query_position: tl.tensor,
    stride_kq: tl.tensor,
    stride_vq: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    T: tl.constexpr,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Queries against keys ``[begin, end)``, each seen or not by row and position.

    Excluded queries have a row that no key has.
    """
    for start in tl.range(begin, end, T):
        token = start + tl.arange(0, T)
        inside = token < end
        key_row = tl.load(row_ptr + token, mask=inside, other=-1)
        key_position = tl.load(position_ptr + token, mask=inside, other=0)
        visible = query_row[:, None] == key_row[None, :]
        visible = visible & (key_position[None, :] <= query_position[:, None])
        if RECENT > 0:
            kept = key_position[None, :] > query_position[:, None] - RECENT
            visible = visible & (kept | (key_position < SINK)[None, :])
        key = token.to(tl.int64)
        k = load_vectors(k_head, key, stride_kq, inside, D, P)
        v = load_vectors(v_head, key, stride_vq, inside, D, P)
        scores = tl.where(visible, score(q, k, SOFTCAP), FLOOR)
        acc, largest, total = accumulate(scores, v, acc, largest, total)
    return acc, largest, total


@triton.jit(do_not_specialize=["num_queries", "no_row"])
def causal_kernel(
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
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(query tiles, NUM_HEADS)``; ``RECENT`` 0 means no window. Heavy tiles, the last, start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    q, line, query_row = load_queries(
        q_ptr, row_ptr, tile, head, num_queries, no_row, stride_qq, stride_qk, stride_qg, GROUP, D, P, M
    )
    query, takes_part = line // GROUP, query_row < no_row
    query_position = tl.load(position_ptr + query, mask=query < num_queries, other=0)
    # No loaded key has row -2, so an excluded query sees none.
    seeing_row = tl.where(takes_part, query_row, -2)
    k_head, v_head = k_ptr + head * stride_kk, v_ptr + head * stride_vk
    acc, largest, total = nothing_seen(M, P)

    first = tl.min(tl.where(takes_part, query, num_queries))
    last = tl.max(tl.where(takes_part, query, -1))
    if first <= last:
        first_row = tl.load(row_ptr + first)
        begin = tl.load(row_query_start_ptr + first_row)
        if RECENT > 0:
            band = tl.maximum(begin, first - RECENT + 1)
            if SINK > 0:
                sinks = SINK - tl.load(position_ptr + begin)
                sinks_end = tl.minimum(begin + tl.maximum(sinks, 0), band)
                acc, largest, total = _attend_masked(
                    q, acc, largest, total, k_head, v_head, row_ptr, position_ptr, begin, sinks_end,
                    seeing_row, query_position, stride_kq, stride_vq, D, P, T, SINK, RECENT, SOFTCAP,
                )  # fmt: skip
            begin = band
        else:
            # Whole tiles before the first query are seen by all, when all are of one row.
            is_one_row = tl.min(((query_row == first_row) | (query_row >= no_row)).to(tl.int32)) == 1
            unmasked_end = tl.where(is_one_row, begin + (first + 1 - begin) // T * T, begin)
            for start in tl.range(begin, unmasked_end, T):
                key = (start + tl.arange(0, T)).to(tl.int64)
                k = load_all_vectors(k_head, key, stride_kq, D, P)
                v = load_all_vectors(v_head, key, stride_vq, D, P)
                acc, largest, total = accumulate(score(q, k, SOFTCAP), v, acc, largest, total)
            begin = unmasked_end
        acc, largest, total = _attend_masked(
            q, acc, largest, total, k_head, v_head, row_ptr, position_ptr, begin, last + 1,
            seeing_row, query_position, stride_kq, stride_vq, D, P, T, SINK, RECENT, SOFTCAP,
        )  # fmt: skip
    acc, largest, total = without(acc, largest, total, takes_part)
    store_lines(
        acc, largest, total, attn_ptr, max_ptr, sum_ptr, line, head, 0, num_queries,
        NUM_HEADS, GROUP, D, P,
    )  # fmt: skip


def causal(
    q_QKGD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    causal_row: torch.Tensor,
    positions: torch.Tensor,
    row_query_start: torch.Tensor,
    sink: int,
    recent: int,
    softcap: float,
) -> launch.Triple:
    """Launch the kernel; arguments as in ``kernels_ref.triton.parts``, ``recent`` 0 = no window."""
    num_queries, num_heads, group, dim = q_QKGD.shape
    tiles = launch.prefill(dim, k_QKD.dtype, launch.device_limits(q_QKGD.device))
    out = launch.partials(q_QKGD, num_queries)
    causal_kernel[(launch.num_tiles(num_queries * group, tiles.rows), num_heads)](
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
        SINK=sink,
        RECENT=recent,
        SOFTCAP=softcap,
    )
    return out
