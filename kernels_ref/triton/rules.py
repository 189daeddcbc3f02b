"""Rules by position in kernels: a program of numbers known at compile time, and tiles that are read if seen.

A rule is a union of intersections (``rule_terms``), hence needs no stack: four numbers for each leaf, its
code, its two numbers, and whether it ends an intersection.

Shapes: M query rows of a tile, T keys of a tile, P columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from bias_builders import decode_rule, encoded_rules, rule_terms
from kernels_ref.triton import launch
from kernels_ref.triton.softmax import FLOOR, accumulate, load_vectors, score

WINDOW = tl.constexpr(encoded_rules.WINDOW)
DILATED = tl.constexpr(encoded_rules.DILATED)
STRIDED = tl.constexpr(encoded_rules.STRIDED)


def program(rule: Sequence[int], dtype: torch.dtype, head_dim: int) -> dict[str, object]:
    """Parameters of kernels for a rule in numbers (``encode_rule``), as keywords of a launch.

    Long vectors of float32 are read whether they are seen or not: beside a branch their accumulator would not
    stay in registers.
    """
    numbers = _numbers(tuple(rule))
    skips = dtype.itemsize == 2 or launch.padded_dim(head_dim) <= 64
    return {"RULE": numbers, "LEAVES": len(numbers) // 4, "SKIPS": skips}


@cache
def _numbers(encoded: tuple[int, ...]) -> tuple[int, ...]:
    rule = decode_rule(encoded)
    assert rule is not None, "a rule has numbers"
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
    """The same for a leaf, of keys that are not behind the query."""
    distance = query[:, None] - key[None, :]
    if CODE == WINDOW:
        seen = (distance < B) | (key < A)[None, :]
    elif CODE == DILATED:
        seen = (distance < A * B) & (distance % B == 0)
    elif CODE == STRIDED:
        seen = (distance < A) | (distance % A == 0)
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
    v_base: tl.tensor,
    vector: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    visible: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    SKIPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Queries against one tile of keys, of which only those are read that some query sees.

    Args:
        vector: places of the keys, int64 ``[T]``, in vectors ``stride_k`` and ``stride_v`` apart.
        visible: bool ``[M, T]``.
        SKIPS: a tile of which nothing is seen is left out.
    """
    used = tl.max(visible.to(tl.int32), 0)
    if SKIPS:
        if tl.max(used) > 0:
            acc, largest, total = _attend(
                q, acc, largest, total, k_base, v_base, vector, stride_k, stride_v, visible, used > 0,
                D, P, SOFTCAP,
            )  # fmt: skip
    else:
        acc, largest, total = _attend(
            q, acc, largest, total, k_base, v_base, vector, stride_k, stride_v, visible, used > 0,
            D, P, SOFTCAP,
        )  # fmt: skip
    return acc, largest, total


@triton.jit
def _attend(
    q: tl.tensor,
    acc: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    k_base: tl.tensor,
    v_base: tl.tensor,
    vector: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    visible: tl.tensor,
    used: tl.tensor,
    D: tl.constexpr,
    P: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    k = load_vectors(k_base, vector, stride_k, used, D, P)
    v = load_vectors(v_base, vector, stride_v, used, D, P)
    scores = tl.where(visible, score(q, k, SOFTCAP), FLOOR)
    return accumulate(scores, v, acc, largest, total)
