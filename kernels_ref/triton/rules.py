"""Attention under rules by position: only tiles are read in which a rule may show something."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from bias_builders import decode_rule, encoded_rules, rule_terms
from kernels_ref.triton import launch
from kernels_ref.triton.launch import Triple
from kernels_ref.triton.merging import merge_runs, merge_splits, plan_runs
from kernels_ref.triton.softmax import (
    FLOATS,
    FLOOR,
    accumulate,
    attend_stored,
    elements,
    load_queries,
    load_vectors,
    nothing_seen,
    score,
    store_lines,
    store_partial,
)

WINDOW = tl.constexpr(encoded_rules.WINDOW)
DILATED = tl.constexpr(encoded_rules.DILATED)
STRIDED = tl.constexpr(encoded_rules.STRIDED)
BEHIND = tl.constexpr(encoded_rules.BEHIND)


def program(rule: Sequence[int], dtype: torch.dtype, head_dim: int) -> dict[str, object]:
    """Parameters of kernels for a rule in numbers (``encode_rule``), as keywords of a launch.

    Long vectors of float32 are read visible or not: with a branch their accumulator would not stay in
    registers.
    """
    numbers = _numbers(tuple(rule))
    skips = dtype.itemsize == 2 or launch.padded_dim(head_dim) <= 64
    return {"RULE": numbers, "LEAVES": len(numbers) // 4, "SKIPS": skips}


@cache
def _numbers(encoded: tuple[int, ...]) -> tuple[int, ...]:
    rule = decode_rule(encoded)
    assert rule is not None, "expected a rule"
    terms = rule_terms(rule)
    return tuple(
        number
        for term in terms
        for place, leaf in enumerate(term)
        for number in (*leaf, int(place == len(term) - 1))
    )


@triton.jit
def _sees(
    query: tl.tensor, key: tl.tensor, CODE: tl.constexpr, A: tl.constexpr, B: tl.constexpr
) -> tl.tensor:
    """The same for a leaf, of keys up to the query."""
    distance = query[:, None] - key[None, :]
    if CODE == WINDOW:
        seen = (distance < B) | (key < A)[None, :]
    elif CODE == DILATED:
        seen = (distance < A * B) & (distance % B == 0)
    elif CODE == STRIDED:
        seen = (distance < A) | (distance % A == 0)
    elif CODE == BEHIND:
        seen = (distance == 0) | (key >= A)[None, :]
    else:
        same = (query // A)[:, None] == (key // A)[None, :]
        seen = same | (key % A >= A - B)[None, :]
    return seen


@triton.jit
def sees(query: tl.tensor, key: tl.tensor, RULE: tl.constexpr, LEAVES: tl.constexpr) -> tl.tensor:
    """Whether positions ``query [M]`` see positions ``key [T]``, ``[M, T]``."""
    is_past = key[None, :] <= query[:, None]
    seen_by_any = is_past & (key < 0)[None, :]
    seen_by_all = is_past
    for leaf in tl.static_range(LEAVES):
        seen = _sees(query, key, RULE[4 * leaf], RULE[4 * leaf + 1], RULE[4 * leaf + 2])
        seen_by_all = seen_by_all & seen
        if RULE[4 * leaf + 3] == 1:
            seen_by_any = seen_by_any | seen_by_all
            seen_by_all = is_past
    return seen_by_any


@triton.jit
def attend_seen(
    q: tl.tensor,
    acc: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    k_base: tl.tensor,
    k_meta_ptr: tl.tensor,
    v_base: tl.tensor,
    v_meta_ptr: tl.tensor,
    vector: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    visible: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SKIPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Queries against one tile of keys, of which only those are read that some query sees.

    Args:
        vector: places of the keys, int64 ``[T]``, in vectors ``stride_k`` and ``stride_v`` apart.
        visible: bool ``[M, T]``.
        KEYS, VALUES: kinds of vectors; those of floats alone have other strides than ``D``.
        SKIPS: whether a tile without visible keys is skipped.
    """
    used = tl.max(visible.to(tl.int32), 0)
    if SKIPS:
        if tl.max(used) > 0:
            acc, largest, total = _attend(
                q, acc, largest, total, k_base, k_meta_ptr, v_base, v_meta_ptr, vector, stride_k, stride_v,
                visible, used > 0, D, P, KEYS, VALUES, SOFTCAP,
            )  # fmt: skip
    else:
        acc, largest, total = _attend(
            q, acc, largest, total, k_base, k_meta_ptr, v_base, v_meta_ptr, vector, stride_k, stride_v,
            visible, used > 0, D, P, KEYS, VALUES, SOFTCAP,
        )  # fmt: skip
    return acc, largest, total


@triton.jit
def _attend(
    q: tl.tensor,
    acc: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    k_base: tl.tensor,
    k_meta_ptr: tl.tensor,
    v_base: tl.tensor,
    v_meta_ptr: tl.tensor,
    vector: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    visible: tl.tensor,
    used: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    if KEYS == FLOATS and VALUES == FLOATS:
        k = load_vectors(k_base, vector, stride_k, used, D, P).to(q.dtype)
        v = load_vectors(v_base, vector, stride_v, used, D, P).to(q.dtype)
        scores = tl.where(visible, score(q, k, SOFTCAP), FLOOR)
        acc, largest, total = accumulate(scores, v, acc, largest, total)
    else:
        acc, largest, total = attend_stored(
            q, acc, largest, total, k_base, k_meta_ptr, v_base, v_meta_ptr, vector, used, visible,
            D, P, KEYS, VALUES, SOFTCAP,
        )  # fmt: skip
    return acc, largest, total


@triton.jit(do_not_specialize=["num_queries", "no_row"])
def sparse_causal_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    row_ptr: tl.tensor,
    position_ptr: tl.tensor,
    row_query_start_ptr: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    num_queries: tl.tensor,
    no_row: tl.tensor,
    stride_qq: tl.tensor,
    stride_qk: tl.tensor,
    stride_qg: tl.tensor,
    stride_kq: tl.tensor,
    stride_kk: tl.tensor,
    stride_vq: tl.tensor,
    stride_vk: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
    RULE: tl.constexpr,
    LEAVES: tl.constexpr,
    SKIPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(query tiles, NUM_HEADS)``. Heavy tiles, the last, start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    q, line, query_row = load_queries(
        q_ptr, row_ptr, tile, head, num_queries, no_row, stride_qq, stride_qk, stride_qg, GROUP, D, P, M
    )
    query, takes_part = line // GROUP, query_row < no_row
    query_position = tl.load(position_ptr + query, mask=query < num_queries, other=0)
    # No loaded key has row -2, so an excluded query sees none.
    seeing_row = tl.where(takes_part, query_row, -2)
    k_head, v_head = k_ptr + head * stride_kk, v_ptr + head * stride_vk
    acc, largest, total = nothing_seen(M, P)

    first = tl.min(tl.where(takes_part, query, num_queries))
    last = tl.max(tl.where(takes_part, query, -1))
    if first <= last:
        begin = tl.load(row_query_start_ptr + tl.load(row_ptr + first))
        for start in tl.range(begin, last + 1, T):
            token = start + tl.arange(0, T)
            inside = token < last + 1
            key_row = tl.load(row_ptr + token, mask=inside, other=-1)
            key_position = tl.load(position_ptr + token, mask=inside, other=0)
            visible = seeing_row[:, None] == key_row[None, :]
            visible = visible & sees(query_position, key_position, RULE, LEAVES)
            acc, largest, total = attend_seen(
                q, acc, largest, total, k_head, k_head, v_head, v_head, token.to(tl.int64),
                stride_kq, stride_vq, visible, D, P, FLOATS, FLOATS, SKIPS, SOFTCAP,
            )  # fmt: skip
    store_lines(
        acc, largest, total, attn_ptr, max_ptr, sum_ptr, line, head, 0, num_queries,
        NUM_HEADS, GROUP, D, P,
    )  # fmt: skip


def sparse_causal(
    q_QKGD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    causal_row: torch.Tensor,
    positions: torch.Tensor,
    row_query_start: torch.Tensor,
    rule: Sequence[int],
    softcap: float,
) -> launch.Triple:
    """Launch the kernel; ``rule`` in numbers, ``softcap`` 0 = none."""
    num_queries, num_heads, group, dim = q_QKGD.shape
    tiles = launch.ruled(dim, k_QKD.dtype, launch.device_limits(q_QKGD.device))
    out = launch.partials(q_QKGD, num_queries)
    sparse_causal_kernel[(launch.num_tiles(num_queries * group, tiles.rows), num_heads)](
        q_QKGD,
        k_QKD,
        v_QKD,
        causal_row,
        positions,
        row_query_start,
        *out,
        num_queries,
        row_query_start.shape[0],
        *q_QKGD.stride()[:3],
        *k_QKD.stride()[:2],
        *v_QKD.stride()[:2],
        **tiles.constants(q_QKGD),
        SOFTCAP=softcap,
        **program(rule, k_QKD.dtype, dim),
    )
    return out


@triton.jit(do_not_specialize=["num_queries", "num_blocks", "no_row"])
def sparse_shared_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_meta_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_meta_ptr: tl.tensor,
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
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    RULE: tl.constexpr,
    LEAVES: tl.constexpr,
    SKIPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Grid ``(query tiles, NUM_HEADS, splits)``; split ``i`` writes to ``attn[i]`` and so on."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q, line, row = load_queries(
        q_ptr, row_ptr, tile, head, num_queries, no_row, stride_qq, stride_qk, stride_qg, GROUP, D, P, M, KEYS
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
            q, acc, largest, total, k_ptr, k_meta_ptr, v_ptr, v_meta_ptr, vector, D, D, visible,
            D, P, KEYS, VALUES, SKIPS, SOFTCAP,
        )  # fmt: skip
    store_lines(
        acc, largest, total, attn_ptr, max_ptr, sum_ptr, line, head, split, num_queries,
        NUM_HEADS, GROUP, D, P, VALUES,
    )  # fmt: skip


def sparse_shared(
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
    k_meta: torch.Tensor | None = None,
    v_meta: torch.Tensor | None = None,
    keys: int = 0,
    values: int = 0,
) -> launch.Triple:
    """Launch the kernel, and the merge of splits; ``rule`` in numbers, ``softcap`` 0 = none."""
    num_queries, num_heads, group, dim = q_QKGD.shape
    num_blocks, block_size = shared_block.shape[0], k_XKBD.shape[2]
    limits = launch.device_limits(q_QKGD.device)
    chosen = launch.ruled(dim, q_QKGD.dtype, limits).for_lines(num_queries * group)
    chosen = chosen.for_keys(block_size, k_XKBD.dtype)
    tiles = launch.num_tiles(num_queries * group, chosen.rows)
    splits = launch.num_splits(tiles * num_heads, num_blocks, limits)
    parts = launch.partials(q_QKGD, splits * num_queries)
    sparse_shared_kernel[(tiles, num_heads, splits)](
        q_QKGD,
        *launch.pointers(k_XKBD, k_meta, v_XKBD, v_meta),
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
        **{**chosen.constants(q_QKGD), **launch.stored_constants(dim, keys, values)},
        SLOTS=block_size,
        SOFTCAP=softcap,
        **program(rule, q_QKGD.dtype, dim),
    )
    return merge_splits(parts, splits)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "num_ranges", "blocks_per_range"])
def sparse_unique_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_meta_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_meta_ptr: tl.tensor,
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
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
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
    query_place = head * stride_qk + group[:, None] * stride_qg + elements(D, P, KEYS)[None, :]
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
                        q, acc, largest, total, k_ptr, k_meta_ptr, v_ptr, v_meta_ptr, vector, D, D, visible,
                        D, P, KEYS, VALUES, SKIPS, SOFTCAP,
                    )  # fmt: skip
                out = (num_runs * num_ranges + work).to(tl.int64)
                place = (out * NUM_HEADS + head) * GROUP + group
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
                q, acc, largest, total, k_ptr, k_meta_ptr, v_ptr, v_meta_ptr, vector, D, D, visible,
                D, P, KEYS, VALUES, SKIPS, SOFTCAP,
            )  # fmt: skip
        out = (blocks_per_range * num_ranges + row).to(tl.int64)
        place = (out * NUM_HEADS + head) * GROUP + group
        store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, place, group < GROUP, D, P, VALUES)


def sparse_unique(
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
    k_meta: torch.Tensor | None = None,
    v_meta: torch.Tensor | None = None,
    keys: int = 0,
    values: int = 0,
) -> Triple:
    """Launch the kernel and its merge; ``rule`` in numbers, ``softcap`` 0 = none."""
    num_rows, num_heads, group, dim = q_NKHD.shape
    limits = launch.device_limits(q_NKHD.device)
    tiles = launch.decode(group, dim, q_NKHD.dtype, limits, k_XKBD)
    runs = plan_runs(q_NKHD, owner)
    sparse_unique_kernel[(num_heads, runs.num_ranges + num_rows)](
        q_NKHD,
        *launch.pointers(k_XKBD, k_meta, v_XKBD, v_meta),
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
        **{**tiles.constants(q_NKHD), **launch.stored_constants(dim, keys, values)},
        TAILS=tail_visible.shape[1],
        TOKENS=tail_visible.shape[2],
        SLOTS=k_XKBD.shape[2],
        RANGE_PAD=launch.next_power_of_two(runs.per_range),
        SOFTCAP=softcap,
        **program(rule, q_NKHD.dtype, dim),
    )
    return merge_runs(q_NKHD, runs)
