"""Merge the partials of tokens and of rows, add sink logits, divide: the end of a layer's attention.

Shapes: Q tokens, N tokens of decode rows, K heads, G query heads of each, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.softmax import LOG2E, add_lines, nothing_seen


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
    # An absent triple is never read, but Triton wants a pointer.
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
