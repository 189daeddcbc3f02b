"""Work of the unique part in one list, ordered by row: the same for every layer and head of a step.

Shapes: N rows of up to M tokens and T tails, NU blocks of the contiguous slice, I = NU + N * T places of the
list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch

_MOST_AT_ONCE = 1024


class WorkMap(NamedTuple):
    """Blocks that iterations read, as a list; its size is static, the used part of it depends on data.

    Attributes:
        block: store block of an item, int32 ``[I]``; undefined behind the last item.
        visible: leading slots of it that each token of its row sees, int32 ``[I, M]``; undefined there too.
        row_begin: row ``n`` owns items ``row_begin[n]`` up to ``row_begin[n + 1]``, int32 ``[N + 1]``; its
            blocks come in the order of the store, its tails last.
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
    """Grid ``(N,)``: each program counts what lies before its row, then places the items of its row."""
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
