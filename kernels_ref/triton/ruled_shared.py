"""Every query against the slots of shared blocks that a rule shows it.

Each tile of queries goes through all shared blocks, works out what its queries see of one, and reads it only
if that is something.

Shapes: Q tokens, K heads, G query heads of each, D head size, B slots of a block, NS shared blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.merge_splits import merge_splits
from kernels_ref.triton.query_tiles import load_queries, store_lines
from kernels_ref.triton.rules import attend_seen, program, sees
from kernels_ref.triton.softmax import nothing_seen


@triton.jit(do_not_specialize=["num_queries", "num_blocks", "no_row"])
def ruled_shared_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    row_ptr: tl.tensor,
    position_ptr: tl.tensor,
    row_start_ptr: tl.tensor,
    shared_block_ptr: tl.tensor,
    shared_start_ptr: tl.tensor,
    shared_reads_ptr: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    num_queries: tl.tensor,
    num_blocks: tl.tensor,
    no_row: tl.tensor,
    stride_qq: tl.tensor,
    stride_qk: tl.tensor,
    stride_qg: tl.tensor,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
    RULE: tl.constexpr,
    LEAVES: tl.constexpr,
    SKIPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(query tiles, NUM_HEADS, splits)``; split ``i`` writes to ``attn[i]`` and so on."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q, line, row = load_queries(
        q_ptr, row_ptr, tile, head, num_queries, no_row, stride_qq, stride_qk, stride_qg, GROUP, D, P, M
    )
    takes_part = row < no_row
    query_position = tl.load(position_ptr + line // GROUP, mask=takes_part, other=0)
    acc, largest, total = nothing_seen(M, P)

    TILES: tl.constexpr = (SLOTS + T - 1) // T
    share = (num_blocks + tl.num_programs(2) - 1) // tl.num_programs(2)
    begin, end = split * share, tl.minimum((split + 1) * share, num_blocks)
    stored = tl.load(row_start_ptr + row, mask=takes_part, other=0)
    reads_ptr = shared_reads_ptr + row.to(tl.int64) * num_blocks
    for step in tl.range(begin * TILES, end * TILES):
        index = step // TILES
        start = tl.load(shared_start_ptr + index)
        reads = tl.load(reads_ptr + index, mask=takes_part, other=0)
        count = tl.minimum(stored - start, SLOTS) * reads
        slot = (step % TILES) * T + tl.arange(0, T)
        visible = slot[None, :] < count[:, None]
        visible = visible & sees(query_position, start + slot, RULE, LEAVES)
        block = tl.load(shared_block_ptr + index).to(tl.int64)
        vector = block * UNIT + head * HEAD + slot
        acc, largest, total = attend_seen(
            q, acc, largest, total, k_ptr, v_ptr, vector, D, D, visible, D, P, SKIPS, SOFTCAP
        )
    store_lines(
        acc, largest, total, attn_ptr, max_ptr, sum_ptr, line, head, split, num_queries,
        NUM_HEADS, GROUP, D, P,
    )  # fmt: skip


def ruled_shared(
    q_QKGD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    row: torch.Tensor,
    positions: torch.Tensor,
    row_start: torch.Tensor,
    shared_block: torch.Tensor,
    shared_start: torch.Tensor,
    shared_reads: torch.Tensor,
    rule: Sequence[int],
    softcap: float,
) -> launch.Triple:
    """Launch the kernel, and the merge of what was cut; ``rule`` in numbers, ``softcap`` 0 = none."""
    num_queries, num_heads, group, dim = q_QKGD.shape
    num_blocks, block_size = shared_block.shape[0], k_XKBD.shape[2]
    limits = launch.device_limits(q_QKGD.device)
    chosen = launch.ruled(dim, k_XKBD.dtype, limits).for_lines(num_queries * group)
    chosen = chosen.for_keys(block_size)
    tiles = launch.num_tiles(num_queries * group, chosen.rows)
    splits = launch.num_splits(tiles * num_heads, num_blocks, limits)
    parts = launch.partials(q_QKGD, splits * num_queries)
    ruled_shared_kernel[(tiles, num_heads, splits)](
        q_QKGD,
        k_XKBD,
        v_XKBD,
        row,
        positions,
        row_start,
        shared_block,
        shared_start,
        shared_reads,
        *parts,
        num_queries,
        num_blocks,
        row_start.shape[0],
        *q_QKGD.stride()[:3],
        **launch.strides(k_XKBD),
        **chosen.constants(q_QKGD),
        SLOTS=block_size,
        SOFTCAP=softcap,
        **program(rule, k_XKBD.dtype, dim),
    )
    return merge_splits(parts, splits)
