"""Merge the triples of the same queries over several ranges of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.softmax import add_lines, nothing_seen, store_partial


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
