"""Bodies of loops: one slice of queries, or one chunk of context, at a time.

Each takes parameters and tensors, and returns tensors. Tensors are whole, and the number of the slice or
chunk is one of them, int32 ``[1]``: a device compiles a graph anew for views at other places of the same
tensor. Those that add to a partial take and return a triple. Those that count return the next number as well.

Shapes: as in ``kernels_ref.reference``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from bias_builders import Rule, Window, causal_mask, ring_mask
from kernels_ref import reference
from kernels_ref.by_owner import add_blocks
from kernels_ref.dense import as_keys, attend_dense
from kernels_ref.hpu.parts import FusedKernels
from kernels_ref.index import gather, part_places
from kernels_ref.loops import How
from kernels_ref.partial import Partial, merge
from kernels_ref.ruled import shared_visible, whole_visible
from kernels_ref.slices import num_parts
from kernels_ref.units import as_units

Tensors: TypeAlias = tuple[torch.Tensor, ...]


def slices_reached(rule: Rule, size: int, most: int) -> int:
    """Slices before its own, ``most`` at most, that a slice of ``size`` tokens reaches, sinks apart."""
    for back in range(most, 0, -1):
        if rule.reaches((back - 1) * size + 1, (back + 1) * size - 1):
            return back
    return 0


def sinks_before(
    how: How,
    number: torch.Tensor,
    q_QKGD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    causal_row: torch.Tensor,
    positions: torch.Tensor,
    row_query_start: torch.Tensor,
) -> Tensors:
    """A slice of queries against the sinks of the one row that may have begun before the slices it reaches.

    Args:
        number: of the slice, which has such slices before it.
    """
    rule = how.rule
    assert rule is not None, "without a rule all slices are reached"
    num_slices = num_parts(len(q_QKGD), how.size)
    first = (number - slices_reached(rule, how.size, num_slices)) * how.size
    owner = gather(causal_row, first)
    begins = torch.cat([row_query_start, row_query_start.new_zeros(1)])
    index = gather(begins, owner) + torch.arange(rule.sink, dtype=owner.dtype, device=owner.device)
    key_row = torch.where(index < first, owner, how.num_rows)
    index = torch.minimum(index, first - 1)
    return in_order(_meet(how, number, q_QKGD, k_QKD, v_QKD, causal_row, positions, index, key_row))


def own_keys(
    how: How,
    number: torch.Tensor,
    back: torch.Tensor,
    attn: torch.Tensor,
    largest: torch.Tensor,
    total: torch.Tensor,
    q_QKGD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    causal_row: torch.Tensor,
    positions: torch.Tensor,
) -> Tensors:
    """A slice of queries against the slice of new keys that comes ``back`` slices before it."""
    index, exists = part_places(number - back, how.size, len(causal_row))
    key_row = torch.where(exists, gather(causal_row, index), how.num_rows)
    partial = _meet(how, number, q_QKGD, k_QKD, v_QKD, causal_row, positions, index, key_row)
    return *in_order(merge(Partial(attn, largest, total), partial)), back + 1


def _meet(
    how: How,
    number: torch.Tensor,
    q_QKGD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    causal_row: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    key_row: torch.Tensor,
) -> Partial:
    """A slice of queries against some of the new keys, by index."""
    queries, _ = part_places(number, how.size, len(causal_row))
    row, position = gather(causal_row, queries), gather(positions, queries)
    visible_QT = causal_mask(
        row, position, key_row, gather(positions, index), no_row=how.num_rows, rule=how.rule
    )
    keys, values = gather(k_QKD, index), gather(v_QKD, index)
    return _dense(how)(gather(q_QKGD, queries), keys, values, visible_QT, how.scoring)


def shared_chunk(
    how: How,
    number: torch.Tensor,
    attn: torch.Tensor,
    largest: torch.Tensor,
    total: torch.Tensor,
    q_QKGD: torch.Tensor,
    k_flat: torch.Tensor,
    v_flat: torch.Tensor,
    row_start: torch.Tensor,
    row: torch.Tensor,
    block: torch.Tensor,
    start: torch.Tensor,
    reads_NX: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> Tensors:
    """Every query against one chunk of shared blocks.

    Args:
        positions: of the queries, if there is a rule.
    """
    assert how.layout is not None, "blocks have a layout"
    units = as_units(k_flat, v_flat, how.layout)
    some, exists = part_places(number, how.size, len(block))
    # One more entry, for the row number of padding.
    stored = torch.cat([row_start, row_start.new_zeros(1)])[:, None]
    reads = reads_NX.index_select(1, some) * exists.to(reads_NX.dtype)
    start = gather(start, some)
    visible_row_X = (stored - start) * reads
    seen, ruled = (gather(block, some), visible_row_X, row), None
    if how.rule is not None and positions is not None:
        ruled = shared_visible(how.rule, positions, start, how.layout.num_slots)
    partial = reference.some_shared_blocks(q_QKGD, units, *seen, how.scoring, _dense(how), ruled)
    return *in_order(merge(Partial(attn, largest, total), partial)), number + 1


def rings(
    how: How,
    number: torch.Tensor,
    q_QKGD: torch.Tensor,
    k_CKWD: torch.Tensor,
    v_CKWD: torch.Tensor,
    causal_row: torch.Tensor,
    positions: torch.Tensor,
    chunk_row: torch.Tensor,
    chunk_position: torch.Tensor,
) -> Tensors:
    """A slice of queries against the rings of prompts."""
    window = how.rule
    assert isinstance(window, Window), "rings have a window"
    queries, _ = part_places(number, how.size, len(causal_row))
    row, position = gather(causal_row, queries), gather(positions, queries)
    k_TKD, v_TKD = as_keys(k_CKWD, v_CKWD, chunk_position >= 0)
    visible_QCW = ring_mask(row, position, chunk_row, chunk_position, window)
    partial = _dense(how)(gather(q_QKGD, queries), k_TKD, v_TKD, visible_QCW.flatten(1), how.scoring)
    return *in_order(partial), number + 1


def unique_chunk(
    how: How,
    number: torch.Tensor,
    attn: torch.Tensor,
    largest: torch.Tensor,
    total: torch.Tensor,
    q_NKHD: torch.Tensor,
    k_flat: torch.Tensor,
    v_flat: torch.Tensor,
    owner: torch.Tensor,
    owner_start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
) -> Tensors:
    """Decode rows against one chunk of whole blocks, which is gathered, added to what they have seen.

    Args:
        owner_start, end: positions of the first slots of blocks, and behind tokens, if there is a rule.
    """
    assert how.layout is not None, "blocks have a layout"
    some, exists = part_places(number, how.size, len(owner))
    owner = torch.where(exists, gather(owner, some), len(q_NKHD))
    k, v = gather(how.layout.view(k_flat), some), gather(how.layout.view(v_flat), some)
    seen = Partial(attn, largest, total)
    add, visible = FusedKernels(how.operators).add, None
    if how.rule is not None and owner_start is not None and end is not None:
        start = gather(owner_start, some)
        visible = whole_visible(how.rule, end, owner, start, how.layout.num_slots)
    return *in_order(add_blocks(seen, q_NKHD, k, v, owner, how.scoring, add, visible)), number + 1


def in_order(partial: Sequence[torch.Tensor]) -> Tensors:
    """Return tensors with the strides of new ones, along dimensions of size 1 as well.

    A device compiles for strides, so each round takes what the last one returned in the same ones.
    """
    return tuple(x.reshape(-1).view(x.shape) for x in partial)


def _dense(how: How) -> reference.Dense:
    fused = FusedKernels(how.operators)
    return fused.dense if fused.fuses(how.scoring) else attend_dense
