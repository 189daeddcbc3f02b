"""The unique part in equal pieces of work, however uneven or scattered the contexts are (Stream-K).

Shapes: N rows of up to M tokens and T tails, K heads, G query heads of each, H = M * G for all tokens of a
row, D head size, NU blocks of the contiguous slice.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels_ref.triton import launch
from kernels_ref.triton.launch import Triple
from kernels_ref.triton.stream_k_choice import num_workers
from kernels_ref.triton.stream_k_map import build_work_map
from kernels_ref.triton.stream_k_ranges import attend_ranges_kernel, merge_cut_tiles_kernel


def stream_k(
    q_NKHD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    owner: torch.Tensor,
    tail_block: torch.Tensor,
    tail_visible: torch.Tensor,
    softcap: float,
    workers: int | None = None,
) -> Triple:
    """Map the work, read it in equal ranges, merge what was cut; arguments as for the split kernel.

    Args:
        workers: ranges into which the work is cut, None = as many as suit the device. Results for
            different numbers differ by rounding only, and repeat exactly for the same one.
    """
    num_rows, num_heads, group, dim = q_NKHD.shape
    block_size = k_XKBD.shape[2]
    limits = launch.device_limits(q_NKHD.device)
    tiles = launch.decode(group, dim, k_XKBD.dtype, limits)
    # Reading a block's number and then its keys takes two stages more to have as many tiles on their way.
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
        k_XKBD,
        v_XKBD,
        *work,
        *out,
        *cut,
        num_rows,
        *q_NKHD.stride()[:3],
        **launch.strides(k_XKBD),
        **sizes,
        TOKENS=tail_visible.shape[2],
        SLOTS=block_size,
        T=min(tiles.keys, max(launch.MIN_TILE, launch.next_power_of_two(block_size))),
        ROWS_PAD=launch.next_power_of_two(max(num_rows, 2)),
        SOFTCAP=softcap,
        **tiles.options,
    )
    merge_cut_tiles_kernel[(num_rows, num_heads)](
        work.row_begin, *out, *cut, num_rows, workers, **sizes, **launch.MERGE.options
    )
    return out
