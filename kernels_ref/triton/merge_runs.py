"""Workspace of decodes that are cut over blocks, and the sums of its triples, row by row."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.softmax import FLOOR, LOG2E, SEEN


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
    """Grid ``(NUM_QUERY_HEADS, N)``; each program ends one query head of one row.

    Begins with the row's tail, then takes run 0 of all ranges, ``RANGES`` at a time, run 1, and so on,
    up to the largest number of runs that any range has. Always in this order, so results repeat.
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
    """Room for the triples that programs over ranges of blocks leave.

    Attributes:
        triple: run ``r`` of range ``c`` at ``r * num_ranges + c``, and behind all of them the rows' tails.
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
    """Cut the blocks that ``owner`` tells of into ranges."""
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
