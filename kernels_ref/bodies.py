"""Bodies of loops: one slice of queries, or one chunk of context, at a time.

Each takes parameters and tensors, and returns tensors; those that add to a partial take and return a triple.

Shapes: as in ``kernels_ref.reference``; S slices.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from bias_builders import causal_mask, ring_mask
from kernels_ref import reference
from kernels_ref.hpu.parts import FusedKernels
from kernels_ref.index import gather
from kernels_ref.loops import How
from kernels_ref.partial import Partial, merge
from kernels_ref.units import as_units

Tensors: TypeAlias = tuple[torch.Tensor, ...]


def sinks_before_slices(
    how: How, causal_row: torch.Tensor, positions: torch.Tensor, row_query_start: torch.Tensor
) -> Tensors:
    """Sinks of the one row that may have begun before the keys that a slice of queries meets.

    Returns:
        Flat indices of the tokens, their rows, which are nobody's where there is no such token, and their
        positions, int32 ``[S, sink]`` each.
    """
    size, window, num_queries = how.size, how.window, causal_row.shape[0]
    assert window is not None, "retrieval heads see all keys"
    # Slices of keys before its own that a slice of queries reaches.
    num_reached = -(-(window.recent - 1) // size)
    number = torch.arange(-(-num_queries // size), dtype=causal_row.dtype, device=causal_row.device)
    first = torch.clamp(number - num_reached, min=0) * size
    owner = gather(causal_row, first)
    begins = torch.cat([row_query_start, row_query_start.new_zeros(1)])
    sink = torch.arange(window.sink, dtype=owner.dtype, device=owner.device)
    index = gather(begins, owner)[:, None] + sink
    row = torch.where(index < first[:, None], owner[:, None], how.num_rows)
    index = torch.minimum(index, torch.clamp(first - 1, min=0)[:, None])
    return index, row, gather(positions, index.view(-1)).view(index.shape)


def listed_keys(
    how: How,
    q_QKGD: torch.Tensor,
    query_row: torch.Tensor,
    query_position: torch.Tensor,
    attn: torch.Tensor,
    largest: torch.Tensor,
    total: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    index: torch.Tensor,
    key_row: torch.Tensor,
    key_position: torch.Tensor,
) -> Tensors:
    """A slice of queries against some of the new keys, by index."""
    seen = attn, largest, total
    keys = gather(k_QKD, index), gather(v_QKD, index), key_row, key_position
    return own_keys(how, q_QKGD, query_row, query_position, *seen, *keys)


def own_keys(
    how: How,
    q_QKGD: torch.Tensor,
    query_row: torch.Tensor,
    query_position: torch.Tensor,
    attn: torch.Tensor,
    largest: torch.Tensor,
    total: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    key_row: torch.Tensor,
    key_position: torch.Tensor,
) -> Tensors:
    """A slice of queries against some of the new keys."""
    visible_QT = causal_mask(
        query_row, query_position, key_row, key_position, no_row=how.num_rows, window=how.window
    )
    partial = _dense(how)(q_QKGD, k_TKD, v_TKD, visible_QT, how.scoring)
    return _triple(merge(Partial(attn, largest, total), partial))


def shared_chunk(
    how: How,
    q_QKGD: torch.Tensor,
    attn: torch.Tensor,
    largest: torch.Tensor,
    total: torch.Tensor,
    k_flat: torch.Tensor,
    v_flat: torch.Tensor,
    row_start: torch.Tensor,
    row: torch.Tensor,
    block: torch.Tensor,
    start: torch.Tensor,
    reads_XN: torch.Tensor,
) -> Tensors:
    """Every query against one chunk of shared blocks."""
    assert how.layout is not None, "blocks have a layout"
    units = as_units(k_flat, v_flat, how.layout)
    # One more entry, for the row number of padding.
    stored = torch.cat([row_start, row_start.new_zeros(1)])[:, None]
    visible_row_X = (stored - start) * reads_XN.t()
    partial = reference.some_shared_blocks(q_QKGD, units, block, visible_row_X, row, how.scoring, _dense(how))
    return _triple(merge(Partial(attn, largest, total), partial))


def rings(
    how: How,
    q_QKGD: torch.Tensor,
    query_row: torch.Tensor,
    query_position: torch.Tensor,
    k_CKWD: torch.Tensor,
    v_CKWD: torch.Tensor,
    chunk_row: torch.Tensor,
    chunk_position: torch.Tensor,
) -> Tensors:
    """A slice of queries against the rings of prompts."""
    assert how.window is not None, "rings have a window"
    k_TKD, v_TKD = reference.as_keys(k_CKWD, v_CKWD, chunk_position >= 0)
    visible_QCW = ring_mask(query_row, query_position, chunk_row, chunk_position, how.window)
    return _triple(_dense(how)(q_QKGD, k_TKD, v_TKD, visible_QCW.flatten(1), how.scoring))


def unique_chunk(
    how: How,
    q_NKHD: torch.Tensor,
    attn: torch.Tensor,
    largest: torch.Tensor,
    total: torch.Tensor,
    k_flat: torch.Tensor,
    v_flat: torch.Tensor,
    owner: torch.Tensor,
) -> Tensors:
    """Decode rows against one chunk of whole blocks, added to what they have seen."""
    assert how.layout is not None, "blocks have a layout"
    k, v = how.layout.view(k_flat), how.layout.view(v_flat)
    seen = Partial(attn, largest, total)
    add = FusedKernels(how.operators).add
    return _triple(reference.add_blocks(seen, q_NKHD, k, v, owner, how.scoring, add))


def _triple(partial: Partial) -> Tensors:
    """Return a partial in the strides in which the next call takes it."""
    return tuple(x.contiguous() for x in partial)


def _dense(how: How) -> reference.Dense:
    fused = FusedKernels(how.operators)
    return fused.dense if fused.fuses(how.scoring) else reference.attend_dense
