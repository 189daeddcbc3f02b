"""The unique part in equal pieces of work, however uneven or scattered the contexts are (Stream-K).

Shapes: N rows of up to M tokens and T tails, K heads, G query heads of each, H = M * G for all tokens of a
row, D head size, NU blocks of the contiguous slice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.launch import Triple
from kernels_ref.triton.softmax import (
    FLOOR,
    LOG2E,
    accumulate_stored,
    elements,
    nothing_seen,
    score_stored,
    store_partial,
)
from kernels_ref.triton.stream_k_choice import num_workers

_MOST_AT_ONCE = 1024


class WorkMap(NamedTuple):
    """Blocks that iterations read, as a list; its size is static, the used part of it depends on data.

    Attributes:
        block: store block of an item, int32 ``[I]``; undefined after the last item.
        visible: leading slots of it that each token of its row sees, int32 ``[I, M]``; undefined there too.
        row_begin: row ``n`` owns items ``row_begin[n]`` up to ``row_begin[n + 1]``, int32 ``[N + 1]``; its
            blocks are in the order of the store, its tails last.
    """

    block: torch.Tensor
    visible: torch.Tensor
    row_begin: torch.Tensor


def build_work_map(
    owner: torch.Tensor, tail_block: torch.Tensor, tail_visible: torch.Tensor, block_size: int
) -> WorkMap:
    """Sort what the unique part reads by row, on the device: a counting sort in one launch, no atomics.

    Args:
        owner: row of each block of the slice, N = none, int32 ``[NU]``.
        tail_block: blocks of each row that not all of its tokens see whole, int32 ``[N, T]``.
        tail_visible: leading slots of them that each token sees, 0 = none, int32 ``[N, T, M]``.
    """
    num_blocks, (num_rows, num_tails, num_tokens) = owner.shape[0], tail_visible.shape
    block = owner.new_empty(num_blocks + num_rows * num_tails)
    work = WorkMap(block, block.new_empty(len(block), num_tokens), owner.new_empty(num_rows + 1))
    most = tail_visible if num_tokens == 1 else tail_visible.amax(dim=2)
    widest = max(num_blocks, num_rows * num_tails, launch.MIN_TILE)
    place_items_kernel[(num_rows,)](
        owner,
        tail_block,
        tail_visible,
        most,
        *work,
        num_blocks,
        num_rows,
        TAILS=num_tails,
        TOKENS=num_tokens,
        SLOTS=block_size,
        LANES=min(_MOST_AT_ONCE, launch.next_power_of_two(widest)),
    )
    return work


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def place_items_kernel(
    owner_ptr: tl.tensor,
    tail_block_ptr: tl.tensor,
    tail_visible_ptr: tl.tensor,
    tail_most_ptr: tl.tensor,
    block_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    row_begin_ptr: tl.tensor,
    num_blocks: tl.tensor,
    num_rows: tl.tensor,
    TAILS: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Grid ``(N,)``: each program counts the items before its row, then writes the items of its row."""
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    place = 0
    for begin in tl.range(0, num_blocks, LANES):
        owner = tl.load(owner_ptr + begin + lane, mask=begin + lane < num_blocks, other=num_rows)
        place += tl.sum((owner < row).to(tl.int32))
    for begin in tl.range(0, row * TAILS, LANES):
        seen = tl.load(tail_most_ptr + begin + lane, mask=begin + lane < row * TAILS, other=0)
        place += tl.sum((seen > 0).to(tl.int32))
    tl.store(row_begin_ptr + row, place)
    whole = tl.full([LANES], SLOTS, dtype=tl.int32)
    for begin in tl.range(0, num_blocks, LANES):
        owner = tl.load(owner_ptr + begin + lane, mask=begin + lane < num_blocks, other=num_rows)
        is_mine = (owner == row).to(tl.int32)
        target = place + tl.cumsum(is_mine, axis=0) - 1
        tl.store(block_ptr + target, begin + lane, mask=is_mine > 0)
        for token in tl.static_range(TOKENS):
            tl.store(visible_ptr + target * TOKENS + token, whole, mask=is_mine > 0)
        place += tl.sum(is_mine)
    for tail in tl.static_range(TAILS):
        number = row * TAILS + tail
        if tl.load(tail_most_ptr + number) > 0:
            tl.store(block_ptr + place, tl.load(tail_block_ptr + number))
            for token in tl.static_range(TOKENS):
                seen = tl.load(tail_visible_ptr + number * TOKENS + token)
                tl.store(visible_ptr + place * TOKENS + token, seen)
            place += 1
    if row == num_rows - 1:
        tl.store(row_begin_ptr + num_rows, place)


@triton.jit(do_not_specialize=["num_rows"])
def attend_ranges_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_meta_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_meta_ptr: tl.tensor,
    block_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    row_begin_ptr: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    cut_attn_ptr: tl.tensor,
    cut_max_ptr: tl.tensor,
    cut_sum_ptr: tl.tensor,
    num_rows: tl.tensor,
    stride_qn: tl.tensor,
    stride_qk: tl.tensor,
    stride_qg: tl.tensor,
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
    ROWS_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(workers,)``: every piece of a tile in the worker's range, one after the other."""
    worker = tl.program_id(0).to(tl.int64)
    num_workers = tl.num_programs(0)
    num_items = tl.load(row_begin_ptr + num_rows).to(tl.int64)
    length = num_items * NUM_HEADS
    here = worker * length // num_workers
    end = (worker + 1) * length // num_workers
    rows = tl.arange(0, ROWS_PAD)
    row_ends = tl.load(row_begin_ptr + 1 + rows, mask=rows < num_rows, other=2147483647)
    group = tl.arange(0, M)
    column = tl.arange(0, P)
    order = elements(D, P, KEYS)
    query_mask = (group < GROUP)[:, None] & (column < D)[None, :]
    token = group // (GROUP // TOKENS)
    TILES: tl.constexpr = (SLOTS + T - 1) // T

    while here < end:
        head = here // num_items
        first = here % num_items
        row = tl.sum((row_ends <= first).to(tl.int32))
        tile_begin = tl.load(row_begin_ptr + row).to(tl.int64)
        tile_end = tl.load(row_begin_ptr + row + 1).to(tl.int64)
        last = tl.minimum(tile_end, first + end - here)

        query_place = row * stride_qn + head * stride_qk + group[:, None] * stride_qg + order[None, :]
        q = tl.load(q_ptr + query_place, mask=query_mask, other=0.0)
        acc, largest, total = nothing_seen(M, P)
        # One loop over the tiles of all blocks, so that loads run ahead across the ends of blocks.
        for step in tl.range(0, (last - first).to(tl.int32) * TILES):
            item = first + step // TILES
            slot = (step % TILES) * T + tl.arange(0, T)
            place = tl.load(block_ptr + item).to(tl.int64) * UNIT + head * HEAD + slot
            if TOKENS == 1:
                seen = slot < tl.load(visible_ptr + item)
                scores = score_stored(q, k_ptr, k_meta_ptr, place, seen, D, P, KEYS, False, SOFTCAP)
                scores = tl.where(seen[None, :], scores, FLOOR)
            else:
                visible = tl.load(visible_ptr + item * TOKENS + token, mask=group < GROUP, other=0)
                seen = slot < tl.max(visible)
                scores = score_stored(q, k_ptr, k_meta_ptr, place, seen, D, P, KEYS, False, SOFTCAP)
                scores = tl.where(slot[None, :] < visible[:, None], scores, FLOOR)
            acc, largest, total = accumulate_stored(
                scores, q, v_ptr, v_meta_ptr, place, seen, acc, largest, total, D, P, VALUES, False
            )

        begins_tile = first == tile_begin
        if begins_tile & (last == tile_end):
            unit = (row.to(tl.int64) * NUM_HEADS + head) * GROUP + group
            store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, unit, group < GROUP, D, P, VALUES)
        else:
            unit = (worker * 2 + begins_tile.to(tl.int64)) * GROUP + group
            store_partial(
                acc, largest, total, cut_attn_ptr, cut_max_ptr, cut_sum_ptr, unit, group < GROUP, D, P, VALUES
            )
        here += last - first


@triton.jit(do_not_specialize=["num_rows", "num_workers"])
def merge_cut_tiles_kernel(
    row_begin_ptr: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    cut_attn_ptr: tl.tensor,
    cut_max_ptr: tl.tensor,
    cut_sum_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_workers: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
) -> None:
    """Grid ``(N, NUM_HEADS)``: the pieces of a tile in order, or the empty triple of a row without work."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    num_items = tl.load(row_begin_ptr + num_rows).to(tl.int64)
    length = num_items * NUM_HEADS
    row_begin = tl.load(row_begin_ptr + row).to(tl.int64)
    row_end = tl.load(row_begin_ptr + row + 1).to(tl.int64)
    # Place w belongs to the largest g with g * length // num_workers <= w.
    divisor = tl.maximum(length, 1)
    first = ((head * num_items + row_begin + 1) * num_workers - 1) // divisor
    last = ((head * num_items + row_end) * num_workers - 1) // divisor
    is_empty = row_begin == row_end
    if is_empty | (first < last):
        group = tl.arange(0, M)
        column = tl.arange(0, P)
        inside = group < GROUP
        acc, largest, total = nothing_seen(M, P)
        if is_empty:
            last = first - 1
        for worker in tl.range(first, last + 1):
            # With fewer iterations than workers, some have none.
            if worker * length // num_workers < (worker + 1) * length // num_workers:
                unit = (worker * 2 + (worker == first).to(tl.int64)) * GROUP + group
                piece = tl.load(
                    cut_attn_ptr + unit[:, None] * D + column[None, :],
                    mask=inside[:, None] & (column < D)[None, :],
                    other=0.0,
                )
                piece_max = tl.load(cut_max_ptr + unit, mask=inside, other=FLOOR)
                piece_sum = tl.load(cut_sum_ptr + unit, mask=inside, other=0.0)
                new_largest = tl.maximum(largest, piece_max)
                shrink = tl.exp2((largest - new_largest) * LOG2E)
                weight = tl.exp2((piece_max - new_largest) * LOG2E)
                acc = acc * shrink[:, None] + piece * weight[:, None]
                total = total * shrink + piece_sum * weight
                largest = new_largest
        unit = (row * NUM_HEADS + head) * GROUP + group
        store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, unit, inside, D, P)


def stream_k(
    q_NKHD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    owner: torch.Tensor,
    tail_block: torch.Tensor,
    tail_visible: torch.Tensor,
    softcap: float,
    k_meta: torch.Tensor | None = None,
    v_meta: torch.Tensor | None = None,
    keys: int = 0,
    values: int = 0,
    workers: int | None = None,
) -> Triple:
    """Map the work, process it in equal ranges, merge splits; arguments as for the split kernel.

    Args:
        workers: ranges into which the work is cut, None = as many as suit the device. Results for
            different numbers differ by rounding only, and repeat exactly for the same one.
    """
    num_rows, num_heads, group, dim = q_NKHD.shape
    block_size = k_XKBD.shape[2]
    limits = launch.device_limits(q_NKHD.device)
    tiles = launch.decode(group, dim, q_NKHD.dtype, limits, k_XKBD)
    # Reading a block's index and then its keys needs two more stages for as many tiles in flight.
    tiles = replace(tiles, num_stages=tiles.num_stages + 2)
    workers = num_workers(limits) if workers is None else workers
    work = build_work_map(owner, tail_block, tail_visible, block_size)
    out = launch.partials(q_NKHD, num_rows)
    cut_attn = out[0].new_empty(workers, 2, group, dim)
    cut = (cut_attn, cut_attn.new_empty(workers, 2, group), cut_attn.new_empty(workers, 2, group))
    sizes: dict[str, int] = {
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "D": dim,
        "P": launch.padded_dim(dim),
        "M": tiles.rows,
    }
    attend_ranges_kernel[(workers,)](
        q_NKHD,
        *launch.pointers(k_XKBD, k_meta, v_XKBD, v_meta),
        *work,
        *out,
        *cut,
        num_rows,
        *q_NKHD.stride()[:3],
        **launch.strides(k_XKBD),
        **{**sizes, **launch.stored_constants(dim, keys, values)},
        TOKENS=tail_visible.shape[2],
        SLOTS=block_size,
        T=tiles.for_keys(block_size, k_XKBD.dtype).keys,
        ROWS_PAD=launch.next_power_of_two(max(num_rows, 2)),
        SOFTCAP=softcap,
        **tiles.options,
    )
    merge_cut_tiles_kernel[(num_rows, num_heads)](
        work.row_begin, *out, *cut, num_rows, workers, **sizes, **launch.MERGE.options
    )
    return out
