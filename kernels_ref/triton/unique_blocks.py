"""Decodes against the blocks that only they read: cut over blocks, so that one long context fills a GPU.

A program has a range of blocks of one head and iterates over its *runs*, neighbouring blocks of one owner:
each run is one loop over its tokens without a branch. Blocks without an owner are skipped. The triple of run
``r`` of range ``c`` goes to slot ``r * num_ranges + c`` of a workspace, so that with long runs the used slots
are contiguous; ``merge_runs`` merges the slots of each row. Programs after the ranges process the tails, one
program for each row.

Shapes: N rows of up to M tokens and T tails, K heads, G query heads of each, H = M * G for all tokens of a
row, D head size, NU blocks of the contiguous slice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.launch import Triple
from kernels_ref.triton.merging import merge_runs, plan_runs
from kernels_ref.triton.softmax import attend_leading, attend_run, elements, nothing_seen, store_partial
from kernels_ref.triton.stream_k import stream_k
from kernels_ref.triton.stream_k_choice import choose


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "num_ranges", "blocks_per_range"])
def unique_blocks_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_meta_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_meta_ptr: tl.tensor,
    owner_ptr: tl.tensor,
    tail_block_ptr: tl.tensor,
    tail_visible_ptr: tl.tensor,
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
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    RANGE_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(NUM_HEADS, num_ranges + num_rows)``; ``RANGE_PAD >= blocks_per_range``."""
    head = tl.program_id(0)
    work = tl.program_id(1)
    group = tl.arange(0, M)
    column = tl.arange(0, P)
    query_place = head * stride_qk + group[:, None] * stride_qg + elements(D, P, KEYS)[None, :]
    query_mask = (group < GROUP)[:, None] & (column < D)[None, :]
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
                acc, largest, total = nothing_seen(M, P)
                acc, largest, total = attend_run(
                    q, acc, largest, total, k_ptr, k_meta_ptr, v_ptr, v_meta_ptr, begin, 0,
                    (run_end - begin) * SLOTS, head, UNIT, HEAD, SLOTS, D, P, T, KEYS, VALUES, SOFTCAP,
                )  # fmt: skip
                slot = (num_runs * num_ranges + work).to(tl.int64)
                place = (slot * NUM_HEADS + head) * GROUP + group
                store_partial(
                    acc, largest, total, attn_ptr, max_ptr, sum_ptr, place, group < GROUP, D, P, VALUES
                )
                tl.store(run_row_ptr + num_runs * num_ranges + work, row, mask=head == 0)
                num_runs += 1
            begin = run_end
        tl.store(num_runs_ptr + work, num_runs, mask=head == 0)
    else:
        row = work - num_ranges
        q = tl.load(q_ptr + row * stride_qn + query_place, mask=query_mask, other=0.0)
        acc, largest, total = nothing_seen(M, P)
        token = group // (GROUP // TOKENS)
        for tail in tl.static_range(TAILS):
            place = row * TAILS + tail
            visible = tl.load(tail_visible_ptr + place * TOKENS + token, mask=group < GROUP, other=0)
            acc, largest, total = attend_leading(
                q, acc, largest, total, k_ptr, k_meta_ptr, v_ptr, v_meta_ptr,
                tl.load(tail_block_ptr + place), visible, head, UNIT, HEAD, D, P, T, KEYS, VALUES, SOFTCAP,
            )  # fmt: skip
        slot = (blocks_per_range * num_ranges + row).to(tl.int64)
        place = (slot * NUM_HEADS + head) * GROUP + group
        store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, place, group < GROUP, D, P, VALUES)


def unique_blocks(
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
) -> Triple:
    """Split over the slice or in equal ranges of owned blocks, by ``stream_k_choice``.

    Arguments as in ``kernels_ref.triton.parts``; ``softcap`` 0 = none.
    """
    num_rows, num_heads = q_NKHD.shape[:2]
    limits, reads_codes = launch.device_limits(q_NKHD.device), keys + values > 0
    is_even = choose(num_rows, owner.shape[0], num_heads, limits, reads_codes=reads_codes)
    run = stream_k if is_even else split_unique_blocks
    return run(q_NKHD, k_XKBD, v_XKBD, owner, tail_block, tail_visible, softcap, k_meta, v_meta, keys, values)


def split_unique_blocks(
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
) -> Triple:
    """Launch the kernel of this file and its merge."""
    num_rows, num_heads, group, dim = q_NKHD.shape
    limits = launch.device_limits(q_NKHD.device)
    tiles = launch.decode(group, dim, q_NKHD.dtype, limits, k_XKBD)
    runs = plan_runs(q_NKHD, owner)
    unique_blocks_kernel[(num_heads, runs.num_ranges + num_rows)](
        q_NKHD,
        *launch.pointers(k_XKBD, k_meta, v_XKBD, v_meta),
        owner,
        tail_block,
        tail_visible,
        *runs.triple,
        runs.run_row,
        runs.num_runs,
        num_rows,
        owner.shape[0],
        runs.num_ranges,
        runs.per_range,
        *q_NKHD.stride()[:3],
        **launch.strides(k_XKBD),
        **{**tiles.constants(q_NKHD), **launch.stored_constants(dim, keys, values)},
        TAILS=tail_visible.shape[1],
        TOKENS=tail_visible.shape[2],
        SLOTS=k_XKBD.shape[2],
        RANGE_PAD=launch.next_power_of_two(runs.per_range),
        SOFTCAP=softcap,
    )
    return merge_runs(q_NKHD, runs)
