"""Work of the unique part in one list, ordered by row: the same for every layer and head of a step.

Shapes: N rows, NU blocks of the contiguous slice, NU + N places of the list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch

_MOST_AT_ONCE = 1024


class WorkMap(NamedTuple):
    """Which block each iteration reads; sizes are static, how much of the list is used is data.

    Attributes:
        block: store block of an item, int32 ``[NU + N]``; undefined behind the last item.
        visible: leading slots of it that are seen, at least 1, int32 ``[NU + N]``; undefined there too.
        row_begin: row ``n`` owns items ``row_begin[n]`` up to ``row_begin[n + 1]``, int32 ``[N + 1]``; its
            blocks come in the order of the store, its tail last.
    """

    block: torch.Tensor
    visible: torch.Tensor
    row_begin: torch.Tensor


def build_work_map(
    owner: torch.Tensor, tail_block: torch.Tensor, tail_visible: torch.Tensor, block_size: int
) -> WorkMap:
    """Sort what the unique part reads by row, on the device: a counting sort in one launch, no atomics.

    Args:
        owner: row of each block of the slice, N = nobody, int32 ``[NU]``.
        tail_block, tail_visible: the partly filled block of each row and its seen slots, 0 = none, ``[N]``.
    """
    num_blocks, num_rows = owner.shape[0], tail_block.shape[0]
    block = owner.new_empty(num_blocks + num_rows)
    work = WorkMap(block, torch.empty_like(block), owner.new_empty(num_rows + 1))
    lanes = min(_MOST_AT_ONCE, launch.next_power_of_two(max(num_blocks, num_rows, launch.MIN_TILE)))
    place_items_kernel[(num_rows,)](
        owner, tail_block, tail_visible, *work, num_blocks, num_rows, SLOTS=block_size, LANES=lanes
    )
    return work


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def place_items_kernel(
    owner_ptr: tl.tensor,
    tail_block_ptr: tl.tensor,
    tail_visible_ptr: tl.tensor,
    block_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    row_begin_ptr: tl.tensor,
    num_blocks: tl.tensor,
    num_rows: tl.tensor,
    SLOTS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Grid ``(N,)``: each program counts what lies before its row, then places the items of its row."""
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    place = 0
    for begin in tl.range(0, num_blocks, LANES):
        owner = tl.load(owner_ptr + begin + lane, mask=begin + lane < num_blocks, other=num_rows)
        place += tl.sum((owner < row).to(tl.int32))
    for begin in tl.range(0, row, LANES):
        seen = tl.load(tail_visible_ptr + begin + lane, mask=begin + lane < row, other=0)
        place += tl.sum((seen > 0).to(tl.int32))
    tl.store(row_begin_ptr + row, place)
    for begin in tl.range(0, num_blocks, LANES):
        owner = tl.load(owner_ptr + begin + lane, mask=begin + lane < num_blocks, other=num_rows)
        is_mine = (owner == row).to(tl.int32)
        target = place + tl.cumsum(is_mine, axis=0) - 1
        tl.store(block_ptr + target, begin + lane, mask=is_mine > 0)
        tl.store(visible_ptr + target, tl.full([LANES], SLOTS, dtype=tl.int32), mask=is_mine > 0)
        place += tl.sum(is_mine)
    seen = tl.load(tail_visible_ptr + row)
    if seen > 0:
        tl.store(block_ptr + place, tl.load(tail_block_ptr + row))
        tl.store(visible_ptr + place, seen)
        place += 1
    if row == num_rows - 1:
        tl.store(row_begin_ptr + num_rows, place)
