"""Sums of the weights of a prompt's new tokens by key, from a second product of queries and keys.

A program has a tile of keys and iterates over the queries that see some of it: each sum is written once, and
always computed in one order. Products are of keys and queries, in this order: the left side stays in
registers.

Shapes: Q tokens, R prompt rows of up to N new tokens, C slots, K heads, G query heads of each, D head size; a
tile has M lines, each a query head of a token, ordered by token, and T keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.softmax import FLOOR, LOG2E, load_vectors, score


@triton.jit(do_not_specialize=["most_new", "num_observed"])
def column_sums_kernel(
    q_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    k_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    start_ptr: tl.tensor,
    num_new_ptr: tl.tensor,
    token_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    most_new: tl.tensor,
    num_observed: tl.tensor,
    stride_qq: tl.tensor,
    stride_qk: tl.tensor,
    stride_qg: tl.tensor,
    stride_kq: tl.tensor,
    stride_kk: tl.tensor,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(NUM_HEADS, tiles of slots + tiles of new tokens, R)``: tiles that most queries see come first.

    The leading ``start`` slots of a row are occupied, up to all; the others, and rows without new tokens,
    receive 0. The last ``num_observed`` queries of a row count.
    """
    head, tile, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    SLOT_TILES: tl.constexpr = (SLOTS + T - 1) // T
    num_new = tl.load(num_new_ptr + row)
    begin = tl.load(token_ptr + row.to(tl.int64) * most_new)
    is_new = tile >= SLOT_TILES
    first_key = tl.where(is_new, tile - SLOT_TILES, tile) * T
    key = first_key + tl.arange(0, T)
    if is_new:
        exists = key < num_new
        k = load_vectors(k_ptr + head * stride_kk, (begin + key).to(tl.int64), stride_kq, exists, D, P)
        number = key
        column = SLOTS + key
        is_column = key < most_new
    else:
        exists = key < tl.minimum(tl.load(start_ptr + row), SLOTS)
        k = load_vectors(slots_ptr, row.to(tl.int64) * UNIT + head * HEAD + key, D, exists, D, P)
        # Before all new tokens.
        number = key - SLOTS
        column = key
        is_column = key < SLOTS
    sums = tl.zeros([T, M], dtype=tl.float32)
    # No query before the first key of a tile sees any of it.
    first = tl.maximum(num_new - num_observed, tl.where(is_new, first_key, 0))
    first = tl.maximum(first, 0)
    end = tl.where(tl.max(exists.to(tl.int32)) > 0, num_new * GROUP, 0)
    for first_line in tl.range(first * GROUP, end, M):
        line = first_line + tl.arange(0, M)
        query = line // GROUP
        counts = query < num_new
        token = (begin + query).to(tl.int64)
        place = token * stride_qq + head * stride_qk + (line % GROUP) * stride_qg
        q = load_vectors(q_ptr, place, 1, counts, D, P)
        lse = tl.load(lse_ptr + (token * NUM_HEADS + head) * GROUP + line % GROUP, mask=counts, other=0.0)
        visible = exists[:, None] & counts[None, :] & (number[:, None] <= query[None, :])
        scores = tl.where(visible, score(k, q, SOFTCAP), FLOOR)
        if k_ptr.dtype.element_ty == tl.float32:
            sums += tl.exp(scores - lse[None, :])
        else:
            sums += tl.exp2(scores * LOG2E - (lse * LOG2E)[None, :])
    own = (row.to(tl.int64) * NUM_HEADS + head) * (SLOTS + most_new)
    tl.store(mass_ptr + own + column, tl.sum(sums, 1), mask=is_column)


def column_sums(
    q_QKGD: torch.Tensor,
    lse_QKG: torch.Tensor,
    k_QKD: torch.Tensor,
    slots_RKCD: torch.Tensor | None,
    start: torch.Tensor,
    num_new: torch.Tensor,
    token_RN: torch.Tensor,
    num_observed: int,
    softcap: float,
) -> torch.Tensor:
    """Launch the kernel; arguments as in ``kernels_ref.triton.parts``.

    Args:
        slots_RKCD: keys of the slots, or None.
        token_RN: flat index of each new token of a row; they are contiguous.
        softcap: 0 = none.
    Returns:
        float32 ``[R, K, C + N]``, with C = 0 without slots.
    """
    num_heads, group, dim = q_QKGD.shape[1:]
    num_rows, most_new = token_RN.shape
    num_slots = 0 if slots_RKCD is None else slots_RKCD.shape[2]
    tiles = launch.columns(dim, k_QKD.dtype, launch.device_limits(q_QKGD.device))
    tiles = tiles.for_lines(min(num_observed, most_new) * group)
    mass = lse_QKG.new_empty((num_rows, num_heads, num_slots + most_new))
    num_tiles = launch.num_tiles(num_slots, tiles.keys) + launch.num_tiles(most_new, tiles.keys)
    column_sums_kernel[(num_heads, num_tiles, num_rows)](
        q_QKGD,
        lse_QKG,
        k_QKD,
        k_QKD if slots_RKCD is None else slots_RKCD,
        start,
        num_new,
        token_RN,
        mass,
        most_new,
        num_observed,
        *q_QKGD.stride()[:3],
        *k_QKD.stride()[:2],
        **({"UNIT": 0, "HEAD": 0} if slots_RKCD is None else launch.strides(slots_RKCD)),
        **tiles.constants(q_QKGD),
        SLOTS=num_slots,
        SOFTCAP=softcap,
    )
    return mass
