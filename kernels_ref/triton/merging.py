"""Merge the partials of blocks, of ranges and of rows; add sink logits, divide."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.softmax import FLOOR, LOG2E, SEEN, add_lines, nothing_seen, store_partial


@triton.jit(do_not_specialize=["num_ranges", "blocks_per_range"])
def merge_runs_kernel(
    slot_attn_ptr: tl.tensor,
    slot_max_ptr: tl.tensor,
    slot_sum_ptr: tl.tensor,
    run_row_ptr: tl.tensor,
    num_runs_ptr: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    num_ranges: tl.tensor,
    blocks_per_range: tl.tensor,
    NUM_QUERY_HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    RANGES: tl.constexpr,
) -> None:
    """Grid ``(NUM_QUERY_HEADS, N)``; each program finishes one query head of one row.

    Merges the row's tail, then run 0 of all ranges, ``RANGES`` at a time, run 1, and so on, up to the largest
    number of runs of any range. Always in this order, so results are deterministic.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    column = tl.arange(0, P)
    kept = column < D
    slot = (blocks_per_range * num_ranges + row).to(tl.int64) * NUM_QUERY_HEADS + head
    acc = tl.load(slot_attn_ptr + slot * D + column, mask=kept, other=0.0)
    largest = tl.load(slot_max_ptr + slot)
    total = tl.load(slot_sum_ptr + slot)
    most_runs = 0
    for first in tl.range(0, num_ranges, RANGES):
        place = first + tl.arange(0, RANGES)
        most_runs = tl.maximum(
            most_runs, tl.max(tl.load(num_runs_ptr + place, mask=place < num_ranges, other=0))
        )
    for run in tl.range(0, most_runs):
        for first in tl.range(0, num_ranges, RANGES):
            place = first + tl.arange(0, RANGES)
            num_runs = tl.load(num_runs_ptr + place, mask=place < num_ranges, other=0)
            index = run * num_ranges + place
            owned = run < num_runs
            owned = owned & (tl.load(run_row_ptr + index, mask=owned, other=-1) == row)
            if tl.max(owned.to(tl.int32)) > 0:
                slots = index.to(tl.int64) * NUM_QUERY_HEADS + head
                slot_max = tl.load(slot_max_ptr + slots, mask=owned, other=FLOOR)
                slot_sum = tl.load(slot_sum_ptr + slots, mask=owned, other=0.0)
                slot_attn = tl.load(
                    slot_attn_ptr + slots[:, None] * D + column[None, :],
                    mask=owned[:, None] & kept[None, :],
                    other=0.0,
                )
                new_largest = tl.maximum(largest, tl.max(slot_max, 0))
                shrink = tl.exp2((largest - new_largest) * LOG2E)
                weight = tl.where(slot_max > SEEN, tl.exp2((slot_max - new_largest) * LOG2E), 0.0)
                acc = acc * shrink + tl.sum(slot_attn * weight[:, None], 0)
                total = total * shrink + tl.sum(slot_sum * weight, 0)
                largest = new_largest
    out = row.to(tl.int64) * NUM_QUERY_HEADS + head
    tl.store(attn_ptr + out * D + column, acc, mask=kept)
    tl.store(max_ptr + out, largest)
    tl.store(sum_ptr + out, total)


class Runs(NamedTuple):
    """Buffers for the triples of programs over ranges of blocks.

    Attributes:
        triple: run ``r`` of range ``c`` at ``r * num_ranges + c``, and after all of them the rows' tails.
        run_row: row of each of these runs, int32.
        num_runs: runs of each range, int32.
        num_ranges, per_range: ranges, and blocks of each.
    """

    triple: launch.Triple
    run_row: torch.Tensor
    num_runs: torch.Tensor
    num_ranges: int
    per_range: int


def plan_runs(q_NKHD: torch.Tensor, owner: torch.Tensor) -> Runs:
    """Split the blocks of ``owner`` into ranges."""
    num_rows, num_heads = q_NKHD.shape[:2]
    limits = launch.device_limits(q_NKHD.device)
    per_range = launch.blocks_per_program(owner.shape[0], num_heads, limits)
    num_ranges = launch.num_tiles(owner.shape[0], per_range)
    triple = launch.partials(q_NKHD, per_range * num_ranges + num_rows)
    run_row, num_runs = owner.new_empty(per_range * num_ranges), owner.new_empty(num_ranges)
    return Runs(triple, run_row, num_runs, num_ranges, per_range)


def merge_runs(q_NKHD: torch.Tensor, runs: Runs) -> launch.Triple:
    """Launch the kernel; returns the triples of all rows."""
    num_rows, num_heads, group, dim = q_NKHD.shape
    out = launch.partials(q_NKHD, num_rows)
    merge_runs_kernel[(num_heads * group, num_rows)](
        *runs.triple,
        runs.run_row,
        runs.num_runs,
        *out,
        runs.num_ranges,
        runs.per_range,
        NUM_QUERY_HEADS=num_heads * group,
        D=dim,
        P=launch.padded_dim(dim),
        RANGES=launch.MERGED_SLOTS,
        **launch.MERGE.options,
    )
    return out


@triton.jit(do_not_specialize=["num_lines", "num_splits"])
def merge_splits_kernel(
    split_attn_ptr: tl.tensor,
    split_max_ptr: tl.tensor,
    split_sum_ptr: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    num_lines: tl.tensor,
    num_splits: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    LINES: tl.constexpr,
) -> None:
    """Grid ``(tiles of LINES lines,)``; a line is one query head of one token or row, of ``num_lines``."""
    line = (tl.program_id(0) * LINES + tl.arange(0, LINES)).to(tl.int64)
    inside = line < num_lines
    acc, largest, total = nothing_seen(LINES, P)
    for split in tl.range(0, num_splits):
        source = line + split * num_lines.to(tl.int64)
        acc, largest, total = add_lines(
            acc, largest, total, split_attn_ptr, split_max_ptr, split_sum_ptr, source, inside, D, P
        )
    store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, line, inside, D, P)


def merge_splits(parts: launch.Triple, num_splits: int) -> launch.Triple:
    """Launch the kernel; one split is returned as it is.

    Args:
        parts: ``[num_splits * Q, K, G, D]`` and ``[num_splits * Q, K, G]`` twice, split after split.
    """
    if num_splits == 1:
        return parts
    attn = parts[0]
    num_queries, dim = attn.shape[0] // num_splits, attn.shape[-1]
    out = launch.partials(attn, num_queries)
    num_lines = out[1].numel()
    lines = launch.MERGED_LINES
    merge_splits_kernel[(launch.num_tiles(num_lines, lines),)](
        *parts,
        *out,
        num_lines,
        num_splits,
        D=dim,
        P=launch.padded_dim(dim),
        LINES=lines,
        **launch.MERGE.options,
    )
    return out


@triton.jit(do_not_specialize=["num_lines", "no_row"])
def finish_kernel(
    a_attn_ptr: tl.tensor,
    a_max_ptr: tl.tensor,
    a_sum_ptr: tl.tensor,
    b_attn_ptr: tl.tensor,
    b_max_ptr: tl.tensor,
    b_sum_ptr: tl.tensor,
    c_attn_ptr: tl.tensor,
    c_max_ptr: tl.tensor,
    c_sum_ptr: tl.tensor,
    row_attn_ptr: tl.tensor,
    row_max_ptr: tl.tensor,
    row_sum_ptr: tl.tensor,
    decode_slot_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_lines: tl.tensor,
    no_row: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    LINES: tl.constexpr,
    TOKEN_PARTS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Grid ``(tiles of LINES lines,)``; a line is one of the ``HEADS = K * G`` query heads of a token."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = line < num_lines
    token, head = line // HEADS, line % HEADS
    line = line.to(tl.int64)
    acc, largest, total = nothing_seen(LINES, P)
    if TOKEN_PARTS > 0:
        acc, largest, total = add_lines(
            acc, largest, total, a_attn_ptr, a_max_ptr, a_sum_ptr, line, inside, D, P
        )
    if TOKEN_PARTS > 1:
        acc, largest, total = add_lines(
            acc, largest, total, b_attn_ptr, b_max_ptr, b_sum_ptr, line, inside, D, P
        )
    if TOKEN_PARTS > 2:
        acc, largest, total = add_lines(
            acc, largest, total, c_attn_ptr, c_max_ptr, c_sum_ptr, line, inside, D, P
        )
    if HAS_ROWS:
        row = tl.load(decode_slot_ptr + token, mask=inside, other=no_row)
        place = row.to(tl.int64) * HEADS + head
        acc, largest, total = add_lines(
            acc, largest, total, row_attn_ptr, row_max_ptr, row_sum_ptr, place, row < no_row, D, P
        )
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        new_largest = tl.maximum(largest, sink)
        shrink = tl.exp2((largest - new_largest) * LOG2E)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2((sink - new_largest) * LOG2E)
    # The smallest normal number: an empty query has a sum of zero and becomes zero.
    out = acc / tl.maximum(total, 1.1754943508222875e-38)[:, None]
    column = tl.arange(0, P)
    place = out_ptr + line[:, None] * D + column[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (column < D)[None, :])


def finish(
    like: torch.Tensor,
    of_tokens: list[torch.Tensor],
    of_rows: list[torch.Tensor],
    decode_slot: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Launch the kernel; see ``kernels_ref.triton.parts.finish``.

    Args:
        like: queries ``[Q, K, G, D]``, for shape and type of the result.
        of_tokens: up to three triples laid end to end.
        of_rows: one triple or none.
    """
    dim = like.shape[-1]
    out = like.new_empty(like.shape)
    num_lines = out.numel() // dim
    lines = launch.MERGED_LINES
    # An absent triple is never read, but Triton needs a pointer.
    absent = [decode_slot] * 3
    finish_kernel[(launch.num_tiles(num_lines, lines),)](
        *(of_tokens[:3] or absent),
        *(of_tokens[3:6] or absent),
        *(of_tokens[6:] or absent),
        *(of_rows or absent),
        decode_slot,
        decode_slot if sinks is None else sinks,
        out,
        num_lines,
        of_rows[0].shape[0] if of_rows else 0,
        HEADS=like.shape[1] * like.shape[2],
        D=dim,
        P=launch.padded_dim(dim),
        LINES=lines,
        TOKEN_PARTS=len(of_tokens) // 3,
        HAS_ROWS=bool(of_rows),
        HAS_SINKS=sinks is not None,
        **launch.MERGE.options,
    )
    return out
