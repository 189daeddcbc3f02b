"""Share of each slot in the attention of the queries of its row, from their scores.

Shapes: N rows, K heads, G query heads of each, S slots of a row; a program has the query heads of one row and
head, M >= G lines.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_ref.triton import launch
from kernels_ref.triton.softmax import FLOOR, LOG2E, add_lines, nothing_seen, store_partial, weigh

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
    """Write the weights of slots ``[begin, end)`` of one row and head, 0 beyond the ``visible`` ones.

    Args:
        scores_ptr: of the first query head; those of the others lie ``SLOTS`` further each.
        mass_ptr: of the row and head.
        sinks_ptr: logit of the first query head, which counts in the weights; not read without ``HAS_SINKS``.
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


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def slot_shares_kernel(
    scores_ptr: tl.tensor,
    split_attn_ptr: tl.tensor,
    split_max_ptr: tl.tensor,
    split_sum_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    attn_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """Grid ``(NUM_HEADS, N, 1 + tiles of WIDTH slots)``: the merge of the splits, and the shares by tile.

    Each program reads the maxima and the sums of the splits, which are few numbers.
    """
    head, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = tl.arange(0, M)
    inside = group < GROUP
    own = row.to(tl.int64) * NUM_HEADS + head
    line = own * GROUP + group
    lines_of_split = num_rows.to(tl.int64) * (NUM_HEADS * GROUP)
    acc, largest, total = nothing_seen(M, P)
    if part == 0:
        for split in tl.range(0, num_splits):
            acc, largest, total = add_lines(
                acc, largest, total, split_attn_ptr, split_max_ptr, split_sum_ptr,
                line + split * lines_of_split, inside, D, P,
            )  # fmt: skip
        store_partial(acc, largest, total, attn_ptr, max_ptr, sum_ptr, line, inside, D, P)
    else:
        for split in tl.range(0, num_splits):
            place = line + split * lines_of_split
            split_max = tl.load(split_max_ptr + place, mask=inside, other=FLOOR)
            split_sum = tl.load(split_sum_ptr + place, mask=inside, other=0.0)
            # The sum of an empty split is 0.
            new_largest = tl.maximum(largest, split_max)
            shrink, weight = (largest - new_largest) * LOG2E, (split_max - new_largest) * LOG2E
            total = total * tl.exp2(shrink) + split_sum * tl.exp2(weight)
            largest = new_largest
        begin = (part - 1) * WIDTH
        share_slots(
            scores_ptr + own * GROUP * SLOTS, mass_ptr + own * SLOTS, sinks_ptr + head * GROUP, largest,
            total, begin, tl.minimum(begin + WIDTH, SLOTS), tl.load(visible_ptr + row),
            GROUP, SLOTS, M, WIDTH, HAS_SINKS, EXACT,
        )  # fmt: skip


def slot_shares(
    scores_NKGS: torch.Tensor,
    splits: launch.Triple,
    visible: torch.Tensor,
    sinks_KG: torch.Tensor | None,
    mass_NKS: torch.Tensor,
    *,
    is_exact: bool,
) -> launch.Triple:
    """Launch the kernel, which fills ``mass``; returns the triple of all slots.

    Args:
        scores_NKGS: undefined beyond the ``visible [N, 1, 1]`` slots of a row.
        splits: triples of ranges of slots, ``[splits * N, K, G, D]`` and ``[splits * N, K, G]`` twice.
        is_exact: weights as for values of float32.
    """
    num_rows, num_heads, group, num_slots = scores_NKGS.shape
    dim, width = splits[0].shape[-1], launch.shared_slots()
    out = launch.partials(splits[0], num_rows)
    slot_shares_kernel[(num_heads, num_rows, 1 + launch.num_tiles(num_slots, width))](
        scores_NKGS,
        *splits,
        visible,
        visible if sinks_KG is None else sinks_KG,
        *out,
        mass_NKS,
        num_rows,
        splits[0].shape[0] // num_rows,
        NUM_HEADS=num_heads,
        GROUP=group,
        SLOTS=num_slots,
        D=dim,
        P=launch.padded_dim(dim),
        M=launch.group_rows(group),
        WIDTH=width,
        HAS_SINKS=sinks_KG is not None,
        EXACT=is_exact,
        **launch.MERGE.options,
    )
    return out
