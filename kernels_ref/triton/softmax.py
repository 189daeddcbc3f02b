"""Device functions that several kernels share: soft cap, online softmax, one tile of attention.

Shapes: M query rows of a tile (query heads of tokens), T keys of a tile, P columns (the head size
rounded up to a power of two). Scores, maxima, sums and accumulators are float32.

A hidden score is ``FLOOR``, finite. The weights of an empty row are zero and not ``exp(FLOOR - FLOOR)``, so
it ends as ``(0, FLOOR, 0)`` without a correction.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOOR = tl.constexpr(-1.0e30)
SEEN = tl.constexpr(-0.5e30)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def soften(scores: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Scores squeezed into ``(-SOFTCAP, SOFTCAP)``; 0 means that the model has no soft cap."""
    if SOFTCAP > 0.0:
        small = tl.exp(-2.0 * tl.abs(scores) / SOFTCAP)
        capped = SOFTCAP * (1.0 - small) / (1.0 + small)
        scores = tl.where(scores < 0.0, -capped, capped)
    return scores


INTERPRETED = tl.constexpr(not isinstance(soften, triton.JITFunction))
"""Whether kernels are interpreted; the interpreter would multiply the bits of bfloat16 numbers."""


@triton.jit
def product(left: tl.tensor, right: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """``acc + left @ right`` in float32; the inputs are of one type, and float32 is not rounded to TF32."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def score(q: tl.tensor, k: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Scores ``[M, T]`` of queries ``[M, P]`` and keys ``[T, P]``."""
    nothing = tl.zeros([q.shape[0], k.shape[0]], dtype=tl.float32)
    return soften(product(q, tl.trans(k), nothing), SOFTCAP)


@triton.jit
def nothing_seen(M: tl.constexpr, P: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Accumulator ``[M, P]``, maxima and sums ``[M]`` of empty rows."""
    return (
        tl.zeros([M, P], dtype=tl.float32),
        tl.full([M], FLOOR, dtype=tl.float32),
        tl.zeros([M], tl.float32),
    )


@triton.jit
def weigh(scores: tl.tensor, largest: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """``exp(scores - largest)``, zero in empty rows.

    For half precision the subtraction and the change of base are one fused operation.
    """
    origin = tl.where(largest > SEEN, largest, 0.0)
    if EXACT:
        weights = tl.exp(scores - origin[:, None])
    else:
        weights = tl.exp2(scores * LOG2E - (origin * LOG2E)[:, None])
    return weights


@triton.jit
def accumulate(
    scores: tl.tensor, values: tl.tensor, acc: tl.tensor, largest: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the online softmax (arXiv:1805.02867).

    Args:
        scores: ``[M, T]``, ``FLOOR`` where hidden.
        values: ``[T, P]``, finite.
        acc, largest, total: the triple so far, ``[M, P]``, ``[M]``, ``[M]``.
    """
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    shrink = tl.exp2((largest - new_largest) * LOG2E)
    weights = weigh(scores, new_largest, values.dtype == tl.float32)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = product(weights.to(values.dtype), values, acc)
    return acc, new_largest, total


@triton.jit
def load_vectors(
    base: tl.tensor, row: tl.tensor, stride: tl.tensor, inside: tl.tensor, D: tl.constexpr, P: tl.constexpr
) -> tl.tensor:
    """Vectors of ``D`` numbers, ``stride`` apart: ``[len(row), P]``, zero outside.

    Args:
        row: which vectors, int64.
        inside: which of them exist.
    """
    column = tl.arange(0, P)
    place = base + row[:, None] * stride + column[None, :]
    if D == P:
        vectors = tl.load(place, mask=inside[:, None], other=0.0)
    else:
        vectors = tl.load(place, mask=inside[:, None] & (column < D)[None, :], other=0.0)
    return vectors


@triton.jit
def load_all_vectors(
    base: tl.tensor, row: tl.tensor, stride: tl.tensor, D: tl.constexpr, P: tl.constexpr
) -> tl.tensor:
    """The same for vectors that all exist."""
    column = tl.arange(0, P)
    place = base + row[:, None] * stride + column[None, :]
    if D == P:
        vectors = tl.load(place)
    else:
        vectors = tl.load(place, mask=(column < D)[None, :], other=0.0)
    return vectors


@triton.jit
def attend_run(
    q: tl.tensor,
    acc: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    first_unit: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    head: tl.tensor,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    T: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Queries against tokens ``[begin, end)`` of contiguous units of a store.

    Args:
        q: ``[M, P]``, scaled.
        acc, largest, total: the triple so far; the new one is returned.
        k_ptr, v_ptr: stores with strides ``UNIT`` of units and ``HEAD`` of heads, in vectors.
        first_unit: unit of token 0; token ``t`` is in slot ``t % SLOTS`` of unit ``t // SLOTS`` after it.
    """
    for start in tl.range(begin, end, T):
        token = start + tl.arange(0, T)
        inside = token < end
        unit = (first_unit + token // SLOTS).to(tl.int64)
        row = unit * UNIT + head * HEAD + token % SLOTS
        k = load_vectors(k_ptr, row, D, inside, D, P)
        scores = tl.where(inside[None, :], score(q, k, SOFTCAP), FLOOR)
        v = load_vectors(v_ptr, row, D, inside, D, P)
        acc, largest, total = accumulate(scores, v, acc, largest, total)
    return acc, largest, total


@triton.jit
def attend_leading(
    q: tl.tensor,
    acc: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    unit: tl.tensor,
    visible: tl.tensor,
    head: tl.tensor,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    T: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Queries against leading slots of one unit, ``visible [M]`` of them for each; see ``attend_run``."""
    for start in tl.range(0, tl.max(visible), T):
        slot = start + tl.arange(0, T)
        used = slot < tl.max(visible)
        row = unit.to(tl.int64) * UNIT + head * HEAD + slot
        k = load_vectors(k_ptr, row, D, used, D, P)
        scores = tl.where(slot[None, :] < visible[:, None], score(q, k, SOFTCAP), FLOOR)
        v = load_vectors(v_ptr, row, D, used, D, P)
        acc, largest, total = accumulate(scores, v, acc, largest, total)
    return acc, largest, total


@triton.jit
def store_partial(
    acc: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
) -> None:
    """Write a triple to rows of ``attn [*, D]``, ``max [*]`` and ``sum [*]``, all float32.

    Args:
        row: int64 ``[M]``.
        inside: which rows exist.
    """
    column = tl.arange(0, P)
    place = attn_ptr + row[:, None] * D + column[None, :]
    tl.store(place, acc, mask=inside[:, None] & (column < D)[None, :])
    tl.store(max_ptr + row, largest, mask=inside)
    tl.store(sum_ptr + row, total, mask=inside)


@triton.jit
def add_lines(
    acc: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    line: tl.tensor,
    inside: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Merge a triple with lines of ``attn [*, D]``, ``max [*]`` and ``sum [*]``, empty where not ``inside``.

    Args:
        line: which ones, int64.
    """
    column = tl.arange(0, P)
    kept = inside[:, None] & (column < D)[None, :]
    attn = tl.load(attn_ptr + line[:, None] * D + column[None, :], mask=kept, other=0.0)
    other_max = tl.load(max_ptr + line, mask=inside, other=FLOOR)
    other_sum = tl.load(sum_ptr + line, mask=inside, other=0.0)
    new_largest = tl.maximum(largest, other_max)
    shrink = tl.exp2((largest - new_largest) * LOG2E)
    weight = tl.where(other_max > SEEN, tl.exp2((other_max - new_largest) * LOG2E), 0.0)
    return (
        acc * shrink[:, None] + attn * weight[:, None],
        new_largest,
        total * shrink + other_sum * weight,
    )


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

    Lines past the end, or with row ``no_row``, are excluded: they are zero, of that row.
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
    """The triple with excluded lines emptied, which have attended to unmasked keys."""
    return (
        tl.where(takes_part[:, None], acc, 0.0),
        tl.where(takes_part, largest, FLOOR),
        tl.where(takes_part, total, 0.0),
    )
