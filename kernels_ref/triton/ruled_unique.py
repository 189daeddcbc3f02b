"""Decodes against the slots that a rule shows of the blocks that only they read.

As ``kernels_ref.triton.unique_blocks``, cut over the slice: a program takes a range of blocks of one head,
walks over its runs of one owner, and reads a tile of slots only if a token of the owner sees some of it.

Shapes: N rows of up to M tokens and T tails, K heads, G query heads of each, H = M * G for all tokens of a
row, D head size, NU blocks of the contiguous slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.launch import Triple
from kernels_ref.triton.merge_runs import merge_runs, plan_runs
from kernels_ref.triton.rules import attend_seen, program, sees
from kernels_ref.triton.softmax import nothing_seen, store_partial


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "num_ranges", "blocks_per_range"])
def ruled_unique_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    owner_ptr: tl.tensor,
    owner_start_ptr: tl.tensor,
    tail_block_ptr: tl.tensor,
    tail_start_ptr: tl.tensor,
    tail_visible_ptr: tl.tensor,
    end_ptr: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    run_row_ptr: tl.tensor,
    num_runs_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_blocks: tl.tensor,
    num_ranges: tl.tensor,
    blocks_per_range: tl.tensor,
    stride_qn: tl.tensor,
    stride_qk: tl.tensor,
    stride_qg: tl.tensor,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TAILS: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
    RANGE_PAD: tl.constexpr,
    RULE: tl.constexpr,
    LEAVES: tl.constexpr,
    SKIPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(NUM_HEADS, num_ranges + num_rows)``; ``RANGE_PAD >= blocks_per_range``."""
    head = tl.program_id(0)
    work = tl.program_id(1)
    group = tl.arange(0, M)
    column = tl.arange(0, P)
    query_place = head * stride_qk + group[:, None] * stride_qg + column[None, :]
    query_mask = (group < GROUP)[:, None] & (column < D)[None, :]
    token = group // (GROUP // TOKENS)
    TILES: tl.constexpr = (SLOTS + T - 1) // T
    if work < num_ranges:
        begin = work * blocks_per_range
        end = tl.minimum(begin + blocks_per_range, num_blocks)
        block = begin + tl.arange(0, RANGE_PAD)
        owner = tl.load(owner_ptr + block, mask=block < end, other=num_rows)
        num_runs = 0
        while begin < end:
            row = tl.sum(tl.where(block == begin, owner, 0))
            run_end = tl.min(tl.where((block > begin) & (owner != row), block, end))
            if row < num_rows:
                q = tl.load(q_ptr + row * stride_qn + query_place, mask=query_mask, other=0.0)
                position = tl.load(end_ptr + row * TOKENS + token, mask=group < GROUP, other=0) - 1
                acc, largest, total = nothing_seen(M, P)
                for step in tl.range(begin * TILES, run_end * TILES):
                    unit = step // TILES
                    slot = (step % TILES) * T + tl.arange(0, T)
                    key = tl.load(owner_start_ptr + unit) + slot
                    visible = sees(position, key, RULE, LEAVES) & (slot < SLOTS)[None, :]
                    vector = unit.to(tl.int64) * UNIT + head * HEAD + slot
                    acc, largest, total = attend_seen(
                        q, acc, largest, total, k_ptr, v_ptr, vector, D, D, visible, D, P, SKIPS, SOFTCAP
                    )
                out = (num_runs * num_ranges + work).to(tl.int64)
                place = (out * NUM_HEADS + head) * GROUP + group
                store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, place, group < GROUP, D, P)
                tl.store(run_row_ptr + num_runs * num_ranges + work, row, mask=head == 0)
                num_runs += 1
            begin = run_end
        tl.store(num_runs_ptr + work, num_runs, mask=head == 0)
    else:
        row = work - num_ranges
        q = tl.load(q_ptr + row * stride_qn + query_place, mask=query_mask, other=0.0)
        position = tl.load(end_ptr + row * TOKENS + token, mask=group < GROUP, other=0) - 1
        acc, largest, total = nothing_seen(M, P)
        for step in tl.range(0, TAILS * TILES):
            tail = row * TAILS + step // TILES
            count = tl.load(tail_visible_ptr + tail * TOKENS + token, mask=group < GROUP, other=0)
            slot = (step % TILES) * T + tl.arange(0, T)
            visible = slot[None, :] < count[:, None]
            visible = visible & sees(position, tl.load(tail_start_ptr + tail) + slot, RULE, LEAVES)
            unit = tl.load(tail_block_ptr + tail).to(tl.int64)
            vector = unit * UNIT + head * HEAD + slot
            acc, largest, total = attend_seen(
                q, acc, largest, total, k_ptr, v_ptr, vector, D, D, visible, D, P, SKIPS, SOFTCAP
            )
        out = (blocks_per_range * num_ranges + row).to(tl.int64)
        place = (out * NUM_HEADS + head) * GROUP + group
        store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, place, group < GROUP, D, P)


def ruled_unique(
    q_NKHD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    owner: torch.Tensor,
    owner_start: torch.Tensor,
    tail_block: torch.Tensor,
    tail_start: torch.Tensor,
    tail_visible: torch.Tensor,
    end: torch.Tensor,
    rule: Sequence[int],
    softcap: float,
) -> Triple:
    """Launch the kernel and its merge; ``rule`` in numbers, ``softcap`` 0 = none."""
    num_rows, num_heads, group, dim = q_NKHD.shape
    limits = launch.device_limits(q_NKHD.device)
    tiles = launch.decode(group, dim, k_XKBD.dtype, limits)
    runs = plan_runs(q_NKHD, owner)
    ruled_unique_kernel[(num_heads, runs.num_ranges + num_rows)](
        q_NKHD,
        k_XKBD,
        v_XKBD,
        owner,
        owner_start,
        tail_block,
        tail_start,
        tail_visible,
        end,
        *runs.triple,
        runs.run_row,
        runs.num_runs,
        num_rows,
        owner.shape[0],
        runs.num_ranges,
        runs.per_range,
        *q_NKHD.stride()[:3],
        **launch.strides(k_XKBD),
        **tiles.constants(q_NKHD),
        TAILS=tail_visible.shape[1],
        TOKENS=tail_visible.shape[2],
        SLOTS=k_XKBD.shape[2],
        RANGE_PAD=launch.next_power_of_two(runs.per_range),
        SOFTCAP=softcap,
        **program(rule, k_XKBD.dtype, dim),
    )
    return merge_runs(q_NKHD, runs)
