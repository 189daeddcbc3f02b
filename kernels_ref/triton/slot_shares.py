"""Share of each slot in the attention of the queries of its row, from their scores.

Shapes: N rows, K heads, G query heads of each, S slots of a row; a program has the query heads of one row and
head, M >= G lines.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.softmax import FLOOR, LOG2E, weigh

SMALLEST = tl.constexpr(1.1754943508222875e-38)
"""The smallest normal number: a sum of zero is divided by that."""


@triton.jit
def share_slots(
    scores_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    visible: tl.tensor,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """Write what slots ``[begin, end)`` of one row and head receive, 0 behind the ``visible`` ones.

    Args:
        scores_ptr: of the first query head; those of the others lie ``SLOTS`` further each.
        mass_ptr: of the row and head.
        sinks_ptr: logit of the first query head, which takes its share; not read without ``HAS_SINKS``.
        largest, total: of each query head over all slots, ``[M]``.
        EXACT: weights as for values of float32.
    """
    group = tl.arange(0, M)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + group, mask=group < GROUP, other=FLOOR).to(tl.float32)
        new_largest = tl.maximum(largest, sink)
        total = total * tl.exp2((largest - new_largest) * LOG2E) + tl.exp2((sink - new_largest) * LOG2E)
        largest = new_largest
    share = 1.0 / tl.maximum(total, SMALLEST)
    for first in tl.range(begin, end, WIDTH):
        slot = first + tl.arange(0, WIDTH)
        seen = (group < GROUP)[:, None] & (slot < visible)[None, :]
        scores = tl.load(scores_ptr + group[:, None] * SLOTS + slot[None, :], mask=seen, other=FLOOR)
        mass = tl.sum(weigh(scores, largest, EXACT) * share[:, None], 0)
        tl.store(mass_ptr + slot, mass, mask=slot < end)


@triton.jit
def slot_shares_kernel(
    scores_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """Grid ``(NUM_HEADS, N, tiles of WIDTH slots)``; ``max`` and ``sum`` are those of all slots."""
    head, row = tl.program_id(0), tl.program_id(1)
    group = tl.arange(0, M)
    own = row.to(tl.int64) * NUM_HEADS + head
    largest = tl.load(max_ptr + own * GROUP + group, mask=group < GROUP, other=FLOOR)
    total = tl.load(sum_ptr + own * GROUP + group, mask=group < GROUP, other=0.0)
    begin = tl.program_id(2) * WIDTH
    share_slots(
        scores_ptr + own * GROUP * SLOTS, mass_ptr + own * SLOTS, sinks_ptr + head * GROUP, largest, total,
        begin, tl.minimum(begin + WIDTH, SLOTS), tl.load(visible_ptr + row),
        GROUP, SLOTS, M, WIDTH, HAS_SINKS, EXACT,
    )  # fmt: skip


def slot_shares(
    scores_NKGS: torch.Tensor,
    largest_NKG: torch.Tensor,
    total_NKG: torch.Tensor,
    visible: torch.Tensor,
    sinks_KG: torch.Tensor | None,
    mass_NKS: torch.Tensor,
    *,
    is_exact: bool,
) -> None:
    """Launch the kernel, which fills ``mass``.

    Args:
        scores_NKGS: anything behind the ``visible [N, 1, 1]`` slots of a row.
        is_exact: weights as for values of float32.
    """
    num_rows, num_heads, group, num_slots = scores_NKGS.shape
    width = launch.SHARED_SLOTS
    slot_shares_kernel[(num_heads, num_rows, launch.num_tiles(num_slots, width))](
        scores_NKGS,
        largest_NKG,
        total_NKG,
        visible,
        visible if sinks_KG is None else sinks_KG,
        mass_NKS,
        NUM_HEADS=num_heads,
        GROUP=group,
        SLOTS=num_slots,
        M=launch.group_rows(group),
        WIDTH=width,
        HAS_SINKS=sinks_KG is not None,
        EXACT=is_exact,
        **launch.MERGE.options,
    )
