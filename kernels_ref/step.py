"""The tensors that describe one step to the attention of every layer.

Q padded query tokens, N ring rows of the bucket, C rings gathered for multi-token rows,
NS/NU shared/unique blocks, R rows of the ring stores (row R is the trash row).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bias_builders import Window, ring_slot, slot_position, stays_in_ring
from kernels_ref.index import gather, index_dtype, write_indices


class StepTensors(NamedTuple):
    """Host plan of one step on the device; everything int32.

    Attributes:
        positions: ``[Q]``.
        row: ring row of each token, ``N`` for padding, ``[Q]``.
        causal_row: the same for tokens of multi-token rows, ``N`` for all others, ``[Q]``.
        write_block, write_offset: where each token's keys go; padding goes to the trash block, ``[Q]``.
        row_start: tokens stored before the step, ``[N]``.
        row_num_new: new tokens of the row, 0 when the row is not in this step, ``[N]``.
        row_query_start: flat index of the row's first new token, ``[N]``.
        row_token: flat index of the row's only new token, any valid index elsewhere, ``[N]``.
        tail_block: the unique block that the row has filled in part, else the trash block, ``[N]``.
        tail_visible: leading slots seen of it, 0 = none, ``[N]``.
        chunk_row: multi-token rows that have context, else ``R``, ``[C]``.
        shared_block: ``[NS]``; padding is the trash block.
        shared_visible: leading slots that tokens of each row see, the last row for padding, ``[N + 1, NS]``.
        owner: row that reads block ``b`` of the contiguous slice whole, ``N`` = nobody, ``[NU]``.
    """

    positions: torch.Tensor
    row: torch.Tensor
    causal_row: torch.Tensor
    write_block: torch.Tensor
    write_offset: torch.Tensor
    row_start: torch.Tensor
    row_num_new: torch.Tensor
    row_query_start: torch.Tensor
    row_token: torch.Tensor
    tail_block: torch.Tensor
    tail_visible: torch.Tensor
    chunk_row: torch.Tensor
    shared_block: torch.Tensor
    shared_visible: torch.Tensor
    owner: torch.Tensor


class RingStep(NamedTuple):
    """What the layers of one window and one number of streaming heads derive from a step, once.

    What is for a part that does not run is empty.

    Attributes:
        index_before: where to write before attention: tokens alone in their row; ``[Q * Ks]``.
        index_after: where to write after attention: tokens of multi-token rows that the ring
            keeps; everything else goes to the trash row; ``[Q * Ks]``.
        visible: leading slots that a single-token row sees, 0 for other rows, ``[N]``.
        chunk_position: positions held by the gathered rings before the step, -1 = empty, ``[C, W]``.
    """

    index_before: torch.Tensor
    index_after: torch.Tensor
    visible: torch.Tensor
    chunk_position: torch.Tensor


@dataclass(frozen=True)
class StepParts:
    """Which parts run; fixed for a captured step.

    ``shared`` covers shared blocks and the rings of multi-token rows, ``unique`` unique blocks
    and the rings of single-token rows.
    """

    causal: bool
    shared: bool
    unique: bool


class Step(NamedTuple):
    """A step ready for the layers.

    Attributes:
        parts: which parts run.
        tensors: the plan.
        single_row: row of each token that is alone in its row, ``N`` for all others, ``[Q]``.
        block_index: where ``Kr`` retrieval heads write, by ``Kr``; ``[Q * Kr]``.
        rings: by window and number of streaming heads.
    """

    parts: StepParts
    tensors: StepTensors
    single_row: torch.Tensor
    block_index: dict[int, torch.Tensor]
    rings: dict[tuple[Window, int], RingStep]


def prepare_step(
    parts: StepParts,
    tensors: StepTensors,
    block_size: int,
    trash_row: int,
    retrieval_heads: Collection[int],
    ring_kinds: Collection[tuple[Window, int]],
) -> Step:
    """Derive on the device, once a step, what all layers of a kind need.

    Args:
        retrieval_heads: the distinct numbers of retrieval heads of the layers, without 0.
        ring_kinds: the distinct (window, number of streaming heads), without 0 heads.
    """
    t = tensors
    no_row = t.row_start.shape[0]
    single_row = torch.where(t.causal_row < no_row, no_row, t.row) if parts.causal else t.row
    heads_of: dict[Window, list[int]] = {}
    for window, num_heads in ring_kinds:
        heads_of.setdefault(window, []).append(num_heads)
    rings = {
        (window, num_heads): ring
        for window, head_counts in heads_of.items()
        for num_heads, ring in _ring_steps(parts, t, single_row, window, head_counts, trash_row).items()
    }
    block_index = write_indices(t.write_block, t.write_offset, retrieval_heads, block_size)
    return Step(parts, tensors, single_row, block_index, rings)


def _ring_steps(
    parts: StepParts,
    t: StepTensors,
    single_row: torch.Tensor,
    window: Window,
    head_counts: Collection[int],
    trash_row: int,
) -> dict[int, RingStep]:
    """``RingStep`` by number of streaming heads."""
    no_row = t.row_start.shape[0]
    slot = ring_slot(t.positions, window)
    before = after = dict.fromkeys(head_counts, slot.new_empty(0, dtype=index_dtype(slot.device)))
    visible = t.row_start[:0]
    chunk_position = t.row_start.new_empty(0, window.size)
    if parts.unique:
        row = torch.where(single_row < no_row, single_row, trash_row)
        before = write_indices(row, slot, head_counts, window.size)
        stored = torch.where(t.row_num_new == 1, t.row_start + 1, 0)
        visible = torch.clamp(stored, max=window.size)
    if parts.causal:
        # One more entry, for the row number of padding.
        start, num_new = (torch.cat([x, x.new_zeros(1)]) for x in (t.row_start, t.row_num_new))
        stays = stays_in_ring(t.positions, gather(start + num_new, t.row), window)
        row = torch.where((t.causal_row < no_row) & stays, t.causal_row, trash_row)
        after = write_indices(row, slot, head_counts, window.size)
        if parts.shared:
            chunk_position = slot_position(gather(start, torch.clamp(t.chunk_row, max=no_row)), window)
    return {k: RingStep(before[k], after[k], visible, chunk_position) for k in head_counts}
