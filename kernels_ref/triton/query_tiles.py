"""Device functions of the kernels whose programs have a tile of queries of several tokens.

A tile has M *lines*, each a query head of a token, ordered by token: of all lines, ``i`` is query head
``i % GROUP`` of token ``i // GROUP``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels_ref.triton.softmax import FLOOR, load_vectors, store_partial


@triton.jit
def load_queries(
    q_ptr: tl.tensor,
    row_ptr: tl.tensor,
    tile: tl.tensor,
    head: tl.tensor,
    num_queries: tl.tensor,
    no_row: tl.tensor,
    stride_qq: tl.tensor,
    stride_qk: tl.tensor,
    stride_qg: tl.tensor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Queries ``[M, P]`` of a tile, the lines that they are and the rows of their tokens, ``[M]``.

    Lines that are past the end, or whose row is ``no_row``, take no part: they are zero, of that row.
    """
    line = tile * M + tl.arange(0, M)
    query = line // GROUP
    row = tl.load(row_ptr + query, mask=query < num_queries, other=no_row)
    place = query.to(tl.int64) * stride_qq + head * stride_qk + (line % GROUP) * stride_qg
    return load_vectors(q_ptr, place, 1, row < no_row, D, P), line, row


@triton.jit
def store_lines(
    acc: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    line: tl.tensor,
    head: tl.tensor,
    split: tl.tensor,
    num_queries: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
) -> None:
    """Write the triples of a tile's lines to split ``split`` of ``attn [splits * Q, K, G, D]`` and so on."""
    query = line // GROUP
    token = tl.cast(split, tl.int64) * num_queries + query
    out = (token * NUM_HEADS + head) * GROUP + line % GROUP
    store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, out, query < num_queries, D, P)


@triton.jit
def without(
    acc: tl.tensor, largest: tl.tensor, total: tl.tensor, takes_part: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The triple with lines that take no part emptied, which have met keys that were not masked."""
    return (
        tl.where(takes_part[:, None], acc, 0.0),
        tl.where(takes_part, largest, FLOOR),
        tl.where(takes_part, total, 0.0),
    )
