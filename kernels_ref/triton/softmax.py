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

# Least rows of a product by a group of four warps (wgmma). Two such products, with the halves of 4-bit
# values, were wrong behind one with 8-bit keys and head sizes of 64 and less: Triton 3.6 on an H200.
WARP_GROUP_ROWS = tl.constexpr(64)

# Kinds of stored vectors, see ``launch.KINDS``; those of 8-bit floats are the last.
FLOATS = tl.constexpr(0)
INT8 = tl.constexpr(1)
INT4 = tl.constexpr(2)
FP8 = tl.constexpr(3)
SCALED_FP8 = tl.constexpr(4)
NATIVE_FP8 = tl.constexpr(5)
NATIVE_SCALED_FP8 = tl.constexpr(6)


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
def elements(D: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """The element in each of ``P`` columns of vectors of ``D``: those of 4 bits lie as they are unpacked."""
    column = tl.arange(0, P)
    if KIND == INT4:
        column = (column % 2) * (D // 2) + column // 2
    return column


@triton.jit
def load_vectors(
    base: tl.tensor,
    row: tl.tensor,
    stride: tl.tensor,
    inside: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    KIND: tl.constexpr = 0,
) -> tl.tensor:
    """Vectors of ``D`` numbers, ``stride`` apart: ``[len(row), P]``, zero outside.

    Args:
        row: which vectors, int64.
        inside: which of them exist.
        KIND: of the vectors that they meet, whose order of elements they get.
    """
    column = tl.arange(0, P)
    place = base + row[:, None] * stride + elements(D, P, KIND)[None, :]
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
def load_codes(
    base: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    KIND: tl.constexpr,
    IS_WHOLE: tl.constexpr,
) -> tl.tensor:
    """Codes of stored vectors, or floats themselves: ``[len(row), P]``; of 4 bits half as many bytes.

    Args:
        row: which vectors, int64.
        inside: which of them exist; not looked at if ``IS_WHOLE``.
    """
    WIDTH: tl.constexpr = D // 2 if KIND == INT4 else D
    COLUMNS: tl.constexpr = P // 2 if KIND == INT4 else P
    column = tl.arange(0, COLUMNS)
    place = base + row[:, None] * WIDTH + column[None, :]
    if IS_WHOLE and WIDTH == COLUMNS:
        codes = tl.load(place)
    elif IS_WHOLE:
        codes = tl.load(place, mask=(column < WIDTH)[None, :], other=0)
    elif WIDTH == COLUMNS:
        codes = tl.load(place, mask=inside[:, None], other=0)
    else:
        codes = tl.load(place, mask=inside[:, None] & (column < WIDTH)[None, :], other=0)
    return codes


@triton.jit
def numbers_of(codes: tl.tensor, like: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Codes of all but 4 bits as numbers of the dtype of ``like``; see ``load_meta`` for their units."""
    if KIND >= NATIVE_FP8:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(like.dtype)
    elif KIND >= FP8:
        bits = codes.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        half = tl.where((bits & 0x7F) == 0x7F, tl.full(bits.shape, 0x7E00, tl.uint16), half)
        numbers = half.to(tl.float16, bitcast=True).to(like.dtype)
    else:
        numbers = _to(codes, like)
    return numbers


@triton.jit
def _to(integers: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Integers in the dtype of ``like``; the interpreter would take them for bits of bfloat16."""
    if INTERPRETED:
        integers = integers.to(tl.float32)
    return integers.to(like.dtype)


@triton.jit
def halves_of(codes: tl.tensor, like: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Codes of 4 bits as numbers: those of low halves of bytes, which are even columns, and the others."""
    low, high = (codes & 15).to(tl.int8), (codes >> 4).to(tl.int8)
    return _to(low, like), _to(high, like)


@triton.jit
def load_meta(
    base: tl.tensor, row: tl.tensor, inside: tl.tensor, KIND: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Scale and zero of stored vectors, ``[len(row)]``: what is stored is ``numbers * scale + zero``.

    Numbers of 8-bit floats that are not converted by the device have a 256th of the value.
    """
    zero = tl.zeros(row.shape, dtype=tl.float32)
    if KIND == INT4:
        # Both at once: loads of 4 bytes run ahead of a loop, shorter ones do not.
        both = tl.load(base.to(tl.pointer_type(tl.uint32)) + row, mask=inside, other=0)
        scale = (both << 16).to(tl.float32, bitcast=True)
        zero = (both & 0xFFFF0000).to(tl.float32, bitcast=True)
    elif KIND == FP8:
        scale = zero + 256.0
    elif KIND == NATIVE_FP8:
        scale = zero + 1.0
    else:
        scale = tl.load(base + row, mask=inside, other=0.0).to(tl.float32)
        if KIND == SCALED_FP8:
            scale = scale * 256.0
    return scale, zero


@triton.jit
def score_stored(
    q: tl.tensor,
    k_ptr: tl.tensor,
    k_meta_ptr: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tl.tensor:
    """Scores ``[M, T]`` of queries ``[M, P]``, in the order of the keys, and stored keys.

    Codes are multiplied as they are; their scale is a factor of the scores.
    """
    codes = load_codes(k_ptr, row, inside, D, P, KEYS, IS_WHOLE)
    if KEYS == FLOATS:
        scores = score(q, codes.to(q.dtype), SOFTCAP)
    else:
        scale, zero = load_meta(k_meta_ptr, row, inside, KEYS)
        scores = tl.zeros([q.shape[0], codes.shape[0]], dtype=tl.float32)
        if KEYS == INT4:
            even, odd = tl.split(tl.reshape(q, [q.shape[0], P // 2, 2]))
            low, high = halves_of(codes, q)
            scores = product(odd, tl.trans(high), product(even, tl.trans(low), scores)) * scale[None, :]
            scores += tl.sum(q.to(tl.float32), 1)[:, None] * zero[None, :]
        else:
            scores = product(q, tl.trans(numbers_of(codes, q, KEYS)), scores) * scale[None, :]
        scores = soften(scores, SOFTCAP)
    return scores


@triton.jit
def accumulate_stored(
    scores: tl.tensor,
    like: tl.tensor,
    v_ptr: tl.tensor,
    v_meta_ptr: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    acc: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    VALUES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """``accumulate`` with stored values: weights are multiplied by their scales, and meet codes.

    float16 has too few exponents for that, so values are decoded.

    Args:
        like: of the dtype in which weights and values are multiplied.
    """
    codes = load_codes(v_ptr, row, inside, D, P, VALUES, IS_WHOLE)
    if VALUES == FLOATS:
        acc, largest, total = accumulate(scores, codes.to(like.dtype), acc, largest, total)
    else:
        scale, zero = load_meta(v_meta_ptr, row, inside, VALUES)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2((largest - new_largest) * LOG2E)
        weights = weigh(scores, new_largest, like.dtype == tl.float32)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        IS_DECODED: tl.constexpr = like.dtype == tl.float16
        if IS_DECODED:
            scaled = weights.to(tl.float16)
        else:
            scaled = (weights * scale[None, :]).to(like.dtype)
        if VALUES == INT4:
            low, high = halves_of(codes, like)
            if IS_DECODED:
                low = _decoded(low, scale, zero)
                high = _decoded(high, scale, zero)
            else:
                acc += tl.sum(weights * zero[None, :], 1)[:, None]
            if scores.shape[0] >= WARP_GROUP_ROWS:
                acc = product(scaled, tl.interleave(low, high), acc)
            else:
                nothing = tl.zeros([scores.shape[0], P // 2], dtype=tl.float32)
                acc += tl.interleave(product(scaled, low, nothing), product(scaled, high, nothing))
        else:
            values = numbers_of(codes, like, VALUES)
            if IS_DECODED:
                values = _decoded(values, scale, zero)
            acc = product(scaled, values, acc)
        largest = new_largest
    return acc, largest, total


@triton.jit
def _decoded(numbers: tl.tensor, scale: tl.tensor, zero: tl.tensor) -> tl.tensor:
    return (numbers.to(tl.float32) * scale[:, None] + zero[:, None]).to(numbers.dtype)


@triton.jit
def attend_stored(
    q: tl.tensor,
    acc: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    k_ptr: tl.tensor,
    k_meta_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_meta_ptr: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    visible: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Queries against one tile of stored vectors.

    Args:
        q: ``[M, P]``, scaled, in the order of the keys.
        acc, largest, total: the triple so far, in the order of the values; the new one is returned.
        row: places of the vectors, int64 ``[T]``.
        inside: which are read, bool ``[T]``.
        visible: which of them each query sees, bool ``[M, T]`` or ``[1, T]``.
        KEYS, VALUES: kinds of vectors.
    """
    scores = score_stored(q, k_ptr, k_meta_ptr, row, inside, D, P, KEYS, False, SOFTCAP)
    scores = tl.where(visible, scores, FLOOR)
    return accumulate_stored(
        scores, q, v_ptr, v_meta_ptr, row, inside, acc, largest, total, D, P, VALUES, False
    )


@triton.jit
def attend_run(
    q: tl.tensor,
    acc: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    k_ptr: tl.tensor,
    k_meta_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_meta_ptr: tl.tensor,
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
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Queries against tokens ``[begin, end)`` of contiguous units of a store.

    Args:
        q: ``[M, P]``, scaled.
        acc, largest, total: the triple so far; the new one is returned.
        k_ptr, k_meta_ptr, v_ptr, v_meta_ptr: stores; units are ``UNIT`` and heads ``HEAD`` vectors apart.
        first_unit: unit of token 0; token ``t`` is in slot ``t % SLOTS`` of unit ``t // SLOTS`` after it.
    """
    for start in tl.range(begin, end, T):
        token = start + tl.arange(0, T)
        inside = token < end
        unit = (first_unit + token // SLOTS).to(tl.int64)
        row = unit * UNIT + head * HEAD + token % SLOTS
        acc, largest, total = attend_stored(
            q, acc, largest, total, k_ptr, k_meta_ptr, v_ptr, v_meta_ptr, row, inside, inside[None, :],
            D, P, KEYS, VALUES, SOFTCAP,
        )  # fmt: skip
    return acc, largest, total


@triton.jit
def attend_leading(
    q: tl.tensor,
    acc: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    k_ptr: tl.tensor,
    k_meta_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_meta_ptr: tl.tensor,
    unit: tl.tensor,
    visible: tl.tensor,
    head: tl.tensor,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    T: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Queries against leading slots of one unit, ``visible [M]`` of them for each; see ``attend_run``."""
    for start in tl.range(0, tl.max(visible), T):
        slot = start + tl.arange(0, T)
        used = slot < tl.max(visible)
        row = unit.to(tl.int64) * UNIT + head * HEAD + slot
        acc, largest, total = attend_stored(
            q, acc, largest, total, k_ptr, k_meta_ptr, v_ptr, v_meta_ptr, row, used,
            slot[None, :] < visible[:, None], D, P, KEYS, VALUES, SOFTCAP,
        )  # fmt: skip
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
    VALUES: tl.constexpr = 0,
) -> None:
    """Write a triple to rows of ``attn [*, D]``, ``max [*]`` and ``sum [*]``, all float32.

    Args:
        row: int64 ``[M]``.
        inside: which rows exist.
        VALUES: kind of the values, in whose order the elements are.
    """
    column = tl.arange(0, P)
    place = attn_ptr + row[:, None] * D + elements(D, P, VALUES)[None, :]
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
    KEYS: tl.constexpr = 0,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Queries ``[M, P]`` of a tile, the lines that they are and the rows of their tokens, ``[M]``.

    Lines past the end, or with row ``no_row``, are excluded: they are zero, of that row.
    """
    line = tile * M + tl.arange(0, M)
    query = line // GROUP
    row = tl.load(row_ptr + query, mask=query < num_queries, other=no_row)
    place = query.to(tl.int64) * stride_qq + head * stride_qk + (line % GROUP) * stride_qg
    return load_vectors(q_ptr, place, 1, row < no_row, D, P, KEYS), line, row


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
    VALUES: tl.constexpr = 0,
) -> None:
    """Write the triples of a tile's lines to split ``split`` of ``attn [splits * Q, K, G, D]`` and so on."""
    query = line // GROUP
    token = tl.cast(split, tl.int64) * num_queries + query
    out = (token * NUM_HEADS + head) * GROUP + line % GROUP
    store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, out, query < num_queries, D, P, VALUES)


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
