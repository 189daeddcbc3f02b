"""Add up the triples that ``unique_blocks`` left in its workspace, row by row."""

from __future__ import annotations

import triton
import triton.language as tl

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
