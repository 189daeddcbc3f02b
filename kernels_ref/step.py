"""The tensors that describe one step to the attention of every layer.

Q padded query tokens, N ring rows of the bucket, M most tokens of a decode row, T its tails, C rings gathered
for prompt rows, NS/NU shared/unique blocks, R rows of the ring stores (row R is the trash row).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from bias_builders import (
    Held,
    Leading,
    Ring,
    Seen,
    Window,
    leading_visible,
    ring_slot,
    slot_position,
    stays_in_ring,
)
from kernels_ref.index import gather, index_dtype, write_indices
from kernels_ref.units import UnitLayout

RingKind: TypeAlias = tuple[Window, UnitLayout]
"""What layers share that share a ``RingStep``: what their streaming heads see, and where they keep it."""


class StepTensors(NamedTuple):
    """Host plan of one step on the device; everything int32.

    Attributes:
        positions: ``[Q]``.
        row: ring row of each token, ``N`` for padding, ``[Q]``.
        causal_row: the same for tokens of prompt rows, ``N`` for all others, ``[Q]``.
        write_block, write_offset: where each token's keys go; padding goes to the trash block, ``[Q]``.
        row_start: tokens stored before the step, ``[N]``.
        row_num_new: new tokens of the row, 0 when the row is not in this step, ``[N]``.
        row_query_start: flat index of the row's first new token, any valid index without one, ``[N]``.
        tail_block: unique blocks that not all tokens of the row see whole, else the trash block, ``[N, T]``.
        tail_start: position of their first slots, ``NOWHERE`` where there is none, ``[N, T]``.
        chunk_row: prompt rows that have context, else ``R``, ``[C]``.
        shared_block: ``[NS]``; padding is the trash block.
        shared_start: position of their first slots, ``[NS]``.
        shared_reads: 1 where tokens of a row read a shared block, the last row for padding, ``[N + 1, NS]``.
            They see what was stored before the step, which the part works out for some blocks at a time.
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
    tail_block: torch.Tensor
    tail_start: torch.Tensor
    chunk_row: torch.Tensor
    shared_block: torch.Tensor
    shared_start: torch.Tensor
    shared_reads: torch.Tensor
    owner: torch.Tensor


class BlockStep(NamedTuple):
    """What layers with retrieval heads derive from a step, once.

    What is for a part that does not run is empty.

    Attributes:
        tails: what the tokens of a row see of its tails, ``[N, T, M]``.
    """

    tails: Leading


class RingStep(NamedTuple):
    """What the layers of one window and one layout derive from a step, once.

    What is for a part that does not run is empty.

    Attributes:
        index_before: where to write before attention: tokens of decode rows; ``[Q * Ks]``.
        index_after: where to write after attention: tokens of prompt rows that the ring
            keeps; everything else goes to the trash row; ``[Q * Ks]``.
        seen: what the tokens of decode rows see of their ring.
        chunk_position: positions held by the gathered rings before the step, -1 = empty, ``[C, W]``.
    """

    index_before: torch.Tensor
    index_after: torch.Tensor
    seen: Seen
    chunk_position: torch.Tensor


@dataclass(frozen=True)
class StepParts:
    """Which parts run; fixed for a captured step.

    ``shared`` covers shared blocks and the rings of prompt rows, ``unique`` unique blocks
    and the rings of decode rows.
    """

    causal: bool
    shared: bool
    unique: bool


class Step(NamedTuple):
    """A step ready for the layers.

    Attributes:
        parts: which parts run.
        tensors: the plan.
        decode_len: M.
        row_token: flat index of each token of the N rows, any valid index where there is none, ``[N * M]``.
        decode_slot: place of each token among those, ``N * M`` for tokens of other rows, ``[Q]``.
        blocks: for retrieval heads.
        block_index: where retrieval heads write, by layout; ``[Q * Kr]``.
        rings: for streaming heads.
    """

    parts: StepParts
    tensors: StepTensors
    decode_len: int
    row_token: torch.Tensor
    decode_slot: torch.Tensor
    blocks: BlockStep
    block_index: dict[UnitLayout, torch.Tensor]
    rings: dict[RingKind, RingStep]


def prepare_step(
    parts: StepParts,
    tensors: StepTensors,
    *,
    decode_len: int,
    block_layouts: Collection[UnitLayout],
    ring_kinds: Collection[RingKind],
) -> Step:
    """Derive on the device, once a step, what all layers of a kind need.

    Args:
        decode_len: most tokens of a decode row (M).
        block_layouts: the distinct layouts of block stores; without any, no layer has blocks.
        ring_kinds: the distinct windows and layouts of ring stores.
    """
    rows = _DecodeRows.of(parts, tensors, decode_len)
    layouts_of: dict[Ring, list[UnitLayout]] = {}
    for window, layout in ring_kinds:
        layouts_of.setdefault(Ring.of(window, layout.num_slots), []).append(layout)
    rings = {
        (ring.window, layout): step
        for ring, layouts in layouts_of.items()
        for layout, step in _ring_steps(parts, tensors, rows, ring, layouts).items()
    }
    num_slots = next((layout.num_slots for layout in block_layouts), 0)
    return Step(
        parts,
        tensors,
        decode_len,
        rows.token,
        rows.slot,
        _block_step(parts, tensors, rows, num_slots),
        write_indices(tensors.write_block, tensors.write_offset, block_layouts),
        rings,
    )


class _DecodeRows(NamedTuple):
    """Decode rows of a step.

    Attributes:
        row: row of each token of a decode row, ``N`` for all others, ``[Q]``.
        slot, token: see ``Step``.
        end: position behind each token of the rows, 0 where there is none, ``[N, M]``.
    """

    row: torch.Tensor
    slot: torch.Tensor
    token: torch.Tensor
    end: torch.Tensor

    @classmethod
    def of(cls, parts: StepParts, t: StepTensors, decode_len: int) -> _DecodeRows:
        no_row = t.row_start.shape[0]
        row = torch.where(t.causal_row < no_row, no_row, t.row) if parts.causal else t.row
        if decode_len == 1:
            end = torch.where(t.row_num_new == 1, t.row_start + 1, 0)[:, None]
            return cls(row, row, t.row_query_start, end)
        number = torch.arange(decode_len, dtype=t.row.dtype, device=t.row.device)
        start, num_new = t.row_start[:, None], t.row_num_new[:, None]
        end = torch.where((num_new <= decode_len) & (number < num_new), start + number + 1, 0)
        token = torch.clamp(t.row_query_start[:, None] + number, max=t.row.shape[0] - 1).view(-1)
        begins = torch.cat([t.row_start, t.row_start.new_zeros(1)])
        place = row * decode_len + t.positions - gather(begins, row)
        return cls(row, torch.where(row < no_row, place, no_row * decode_len), token, end)


def _block_step(parts: StepParts, t: StepTensors, rows: _DecodeRows, num_slots: int) -> BlockStep:
    """``BlockStep`` of blocks of ``num_slots`` slots, empty for 0."""
    tails = t.tail_start[:, :0, None]
    if parts.unique and num_slots:
        tails = leading_visible(t.tail_start[:, :, None], rows.end[:, None], num_slots)
    return BlockStep(Leading(tails))


def _ring_steps(
    parts: StepParts,
    t: StepTensors,
    rows: _DecodeRows,
    ring: Ring,
    layouts: Collection[UnitLayout],
) -> dict[UnitLayout, RingStep]:
    """``RingStep`` by layout of the store."""
    no_row = t.row_start.shape[0]
    trash_row = next(iter(layouts)).num_units - 1
    slot = ring_slot(t.positions, ring)
    before = after = dict.fromkeys(layouts, slot.new_empty(0, dtype=index_dtype(slot.device)))
    seen: Seen = Leading(rows.end[:0, None])
    chunk_position = t.row_start.new_empty(0, ring.size)
    if parts.unique:
        row = torch.where(rows.row < no_row, rows.row, trash_row)
        before = write_indices(row, slot, layouts)
        seen = _ring_seen(t, rows, ring)
    if parts.causal:
        # One more entry, for the row number of padding.
        start, num_new = (torch.cat([x, x.new_zeros(1)]) for x in (t.row_start, t.row_num_new))
        stays = stays_in_ring(t.positions, gather(start + num_new, t.row), ring)
        row = torch.where((t.causal_row < no_row) & stays, t.causal_row, trash_row)
        after = write_indices(row, slot, layouts)
        if parts.shared:
            chunk_position = slot_position(gather(start, torch.clamp(t.chunk_row, max=no_row)), ring)
    return {k: RingStep(before[k], after[k], seen, chunk_position) for k in layouts}


def _ring_seen(t: StepTensors, rows: _DecodeRows, ring: Ring) -> Seen:
    """What decode rows see of their rings once their tokens are written."""
    if rows.end.shape[1] == 1 and not ring.slack:
        # A ring then holds what its token sees, and nothing else.
        return Leading(torch.clamp(rows.end, max=ring.size)[:, None])
    stored = torch.clamp(rows.end.amax(dim=1), min=0)
    begin = torch.clamp(rows.end - ring.window.recent, min=0)
    return Held(slot_position(stored, ring)[:, None], begin, rows.end, ring.window.sink)
