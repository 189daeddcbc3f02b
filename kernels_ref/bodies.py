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

from bias_builders import Window, causal_mask, ring_mask
from kernels_ref import reference
from kernels_ref.hpu.parts import FusedKernels
from kernels_ref.index import gather, part_places
from kernels_ref.loops import How
from kernels_ref.partial import Partial, merge
from kernels_ref.units import as_units

Tensors: TypeAlias = tuple[torch.Tensor, ...]


def slices_reached(window: Window, size: int) -> int:
    """Slices before its own that the newest tokens of a window reach, for slices of ``size`` tokens."""
    return -(-(window.recent - 1) // size)


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
    window = how.window
    assert window is not None, "retrieval heads see all keys"
    first = (number - slices_reached(window, how.size)) * how.size
    owner = gather(causal_row, first)
    begins = torch.cat([row_query_start, row_query_start.new_zeros(1)])
    index = gather(begins, owner) + torch.arange(window.sink, dtype=owner.dtype, device=owner.device)
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
        row, position, key_row, gather(positions, index), no_row=how.num_rows, window=how.window
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
) -> Tensors:
    """Every query against one chunk of shared blocks."""
    assert how.layout is not None, "blocks have a layout"
    units = as_units(k_flat, v_flat, how.layout)
    some, exists = part_places(number, how.size, len(block))
    # One more entry, for the row number of padding.
    stored = torch.cat([row_start, row_start.new_zeros(1)])[:, None]
    reads = reads_NX.index_select(1, some) * exists.to(reads_NX.dtype)
    visible_row_X = (stored - gather(start, some)) * reads
    seen = gather(block, some), visible_row_X, row
    partial = reference.some_shared_blocks(q_QKGD, units, *seen, how.scoring, _dense(how))
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
    assert how.window is not None, "rings have a window"
    queries, _ = part_places(number, how.size, len(causal_row))
    row, position = gather(causal_row, queries), gather(positions, queries)
    k_TKD, v_TKD = reference.as_keys(k_CKWD, v_CKWD, chunk_position >= 0)
    visible_QCW = ring_mask(row, position, chunk_row, chunk_position, how.window)
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
) -> Tensors:
    """Decode rows against one chunk of whole blocks, which is gathered, added to what they have seen."""
    assert how.layout is not None, "blocks have a layout"
    some, exists = part_places(number, how.size, len(owner))
    owner = torch.where(exists, gather(owner, some), len(q_NKHD))
    k, v = gather(how.layout.view(k_flat), some), gather(how.layout.view(v_flat), some)
    seen = Partial(attn, largest, total)
    add = FusedKernels(how.operators).add
    return *in_order(reference.add_blocks(seen, q_NKHD, k, v, owner, how.scoring, add)), number + 1


def in_order(partial: Sequence[torch.Tensor]) -> Tensors:
    """Return tensors with the strides of new ones, along dimensions of size 1 as well.

    A device compiles for strides, so each round takes what the last one returned in the same ones.
    """
    return tuple(x.reshape(-1).view(x.shape) for x in partial)


def _dense(how: How) -> reference.Dense:
    fused = FusedKernels(how.operators)
    return fused.dense if fused.fuses(how.scoring) else reference.attend_dense
