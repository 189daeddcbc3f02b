"""The parts on CPU with torch's fused flash attention, which also returns the log-sum-exp.

On CPU the host is the device, so the kernels may look at the plan: each multi-token row attends
over exactly its own keys, mostly without any mask, and pays nothing for padding or for other
rows. That work is hidden behind operators of static output shape, so captured steps stay static.
Parts of single-token rows are bound by memory, not by arithmetic: they are the reference's.

Shapes: as in ``kernels_ref.reference``. Scores cannot be soft-capped here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from bias_builders import Window, leading_slots, sees_streaming
from kernels_ref.partial import FLOOR, Partial, attend, merge
from kernels_ref.reference import unique_blocks, unique_rings
from kernels_ref.step import RingStep, StepTensors

__all__ = ["causal", "shared_blocks", "shared_rings", "unique_blocks", "unique_rings"]

BAND_SLICE = 256
"""Queries of one slice of the streaming band."""

CONTEXT_BLOCKS = 64
"""Context blocks that are gathered at a time."""

_library = torch.library.Library("hpu_duo_kernels", "FRAGMENT")


class _Row(NamedTuple):
    """A multi-token row: number, flat range ``[begin, end)`` of its new tokens, tokens stored before."""

    number: int
    begin: int
    end: int
    start: int


def causal(
    q_QKGD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    t: StepTensors,
    window: Window | None,
    softcap: float | None,
) -> Partial:
    """New tokens of multi-token rows against the new keys of their own row."""
    _refuse(softcap)
    sink, recent = window or (0, 0)
    row_plan = (t.row_start, t.row_num_new, t.row_query_start)
    return Partial(*torch.ops.hpu_duo_kernels.causal(q_QKGD, k_QKD, v_QKD, *row_plan, sink, recent))


def shared_blocks(
    q_QKGD: torch.Tensor, k_XKBD: torch.Tensor, v_XKBD: torch.Tensor, t: StepTensors, softcap: float | None
) -> Partial:
    """Every row against the shared blocks that it sees."""
    _refuse(softcap)
    row_plan = (t.row_start, t.row_num_new, t.row_query_start)
    return Partial(
        *torch.ops.hpu_duo_kernels.shared_blocks(
            q_QKGD, k_XKBD, v_XKBD, *row_plan, t.shared_block, t.shared_visible
        )
    )


def shared_rings(
    q_QKGD: torch.Tensor,
    k_RKWD: torch.Tensor,
    v_RKWD: torch.Tensor,
    t: StepTensors,
    ring: RingStep,
    window: Window,
    softcap: float | None,
) -> Partial:
    """Tokens of multi-token rows against what their ring held before the step."""
    _refuse(softcap)
    row_plan = (t.row_start, t.row_num_new, t.row_query_start)
    return Partial(
        *torch.ops.hpu_duo_kernels.shared_rings(
            q_QKGD, k_RKWD, v_RKWD, *row_plan, t.chunk_row, ring.chunk_position, *window
        )
    )


def _refuse(softcap: float | None) -> None:
    if softcap is not None:
        raise ValueError(f"the fused CPU attention has no soft cap, got softcap={softcap}")


def _causal_op(
    q_QKGD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    row_start: torch.Tensor,
    row_num_new: torch.Tensor,
    row_query_start: torch.Tensor,
    sink: int,
    recent: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    window = Window(sink, recent) if recent else None
    total = _nothing(q_QKGD)
    for row in _multi_token_rows(row_start, row_num_new, row_query_start):
        q, k, v = (x[row.begin : row.end] for x in (q_QKGD, k_QKD, v_QKD))
        if window is None or len(q) <= window.recent:
            _put(total, row.begin, _flash(q, k, v, is_causal=True))
        else:
            for offset, partial in _band(q, k, v, row.start, window):
                _put(total, row.begin + offset, partial)
    return total


def _band(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: Window
) -> Iterator[tuple[int, Partial]]:
    """Slices of a row against the sinks and the band that each can see."""
    position = torch.arange(start, start + len(q), dtype=torch.int32)
    for begin in range(0, len(q), BAND_SLICE):
        end = min(begin + BAND_SLICE, len(q))
        first = max(0, begin - window.recent + 1)
        # Sinks among the new tokens that lie before the band.
        num_sinks = min(max(0, window.sink - start), first)
        keys = [slice(0, num_sinks), slice(first, end)]
        k_T, v_T, position_T = (torch.cat([x[part] for part in keys]) for x in (k, v, position))
        visible = sees_streaming(position[begin:end, None], position_T[None], window)
        yield begin, _flash(q[begin:end], k_T, v_T, visible=visible)


def _shared_blocks_op(
    q_QKGD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    row_start: torch.Tensor,
    row_num_new: torch.Tensor,
    row_query_start: torch.Tensor,
    shared_block: torch.Tensor,
    shared_visible: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = _nothing(q_QKGD)
    for row in _multi_token_rows(row_start, row_num_new, row_query_start):
        visible = shared_visible[row.number]
        seen = visible.nonzero().flatten()
        q = q_QKGD[row.begin : row.end]
        # An empty tensor splits into one empty part, and flash attention needs a key.
        for part in seen.split(CONTEXT_BLOCKS) if len(seen) else ():
            k, v = _as_keys(k_XKBD, v_XKBD, shared_block[part], visible[part])
            _add(total, row.begin, _flash(q, k, v))
    _add_single_rows(
        total, q_QKGD, k_XKBD, v_XKBD, row_num_new, row_query_start, shared_block, shared_visible
    )
    return total


def _as_keys(
    k_XKBD: torch.Tensor, v_XKBD: torch.Tensor, block: torch.Tensor, visible: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The seen slots of some blocks as one list of keys and values ``[T, K, D]``."""
    block_size = k_XKBD.shape[2]
    slot = leading_slots(visible, block_size).flatten().nonzero().flatten()
    # Only a row's last block may be seen in part, so this is nearly always everything.
    is_whole = len(slot) == len(block) * block_size
    k, v = (x.index_select(0, block).transpose(1, 2).flatten(0, 1) for x in (k_XKBD, v_XKBD))
    return (k, v) if is_whole else (k[slot], v[slot])


def _add_single_rows(
    total: Partial,
    q_QKGD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    row_num_new: torch.Tensor,
    row_query_start: torch.Tensor,
    shared_block: torch.Tensor,
    shared_visible: torch.Tensor,
) -> None:
    """Decodes that share blocks: few queries, so one masked product over all of them."""
    visible_rows = shared_visible[:-1] * (row_num_new == 1)[:, None]
    rows = visible_rows.any(dim=1).nonzero().flatten()
    seen = visible_rows.any(dim=0).nonzero().flatten()
    if not len(rows):
        return
    block_size = k_XKBD.shape[2]
    query = row_query_start[rows]
    q_KGND = q_QKGD.index_select(0, query).permute(1, 2, 0, 3)
    for part in seen.split(CONTEXT_BLOCKS):
        visible_NX = visible_rows[rows][:, part]
        k, v = (x.index_select(0, shared_block[part]) for x in (k_XKBD, v_XKBD))
        used = leading_slots(visible_NX.amax(dim=0), block_size)[:, None, :, None]
        k_KTD, v_KTD = (torch.where(used, x, 0).transpose(0, 1).flatten(1, 2) for x in (k, v))
        scores = torch.matmul(q_KGND.flatten(1, 2), k_KTD.transpose(1, 2)).float()
        visible_NT = leading_slots(visible_NX, block_size).flatten(1)
        group, num_rows = q_KGND.shape[1:3]
        seen_partial = attend(scores, visible_NT.repeat(group, 1), v_KTD)
        in_rows = (x.unflatten(1, (group, num_rows)).movedim(2, 0) for x in seen_partial)
        before = Partial(*(x.index_select(0, query) for x in total))
        for whole, merged in zip(total, merge(before, Partial(*in_rows))):
            whole.index_copy_(0, query.long(), merged)


def _shared_rings_op(
    q_QKGD: torch.Tensor,
    k_RKWD: torch.Tensor,
    v_RKWD: torch.Tensor,
    row_start: torch.Tensor,
    row_num_new: torch.Tensor,
    row_query_start: torch.Tensor,
    chunk_row: torch.Tensor,
    chunk_position: torch.Tensor,
    sink: int,
    recent: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    window = Window(sink, recent)
    total = _nothing(q_QKGD)
    for row in _multi_token_rows(row_start, row_num_new, row_query_start):
        if row.start == 0:
            continue
        place = int((chunk_row == row.number).nonzero()[0])
        q = q_QKGD[row.begin : row.end]
        used = min(row.start, window.size)
        k, v = (x[row.number, :, :used].transpose(0, 1) for x in (k_RKWD, v_RKWD))
        # Only the first tokens of the chunk still reach the recent part; all reach the sinks.
        near = min(len(q), window.recent - 1)
        if near:
            query = torch.arange(row.start, row.start + near, dtype=torch.int32)
            held = chunk_position[place, :used]
            _put(
                total,
                row.begin,
                _flash(q[:near], k, v, visible=sees_streaming(query[:, None], held[None], window)),
            )
        num_sinks = min(row.start, sink)
        if near < len(q) and num_sinks:
            _put(total, row.begin + near, _flash(q[near:], k[:num_sinks], v[:num_sinks]))
    return total


def _multi_token_rows(
    row_start: torch.Tensor, row_num_new: torch.Tensor, row_query_start: torch.Tensor
) -> Iterator[_Row]:
    plan = zip(row_start.tolist(), row_num_new.tolist(), row_query_start.tolist())
    for number, (start, num_new, begin) in enumerate(plan):
        if num_new > 1:
            yield _Row(number, begin, begin + num_new, start)


def _flash(
    q_SKGD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    *,
    is_causal: bool = False,
    visible: torch.Tensor | None = None,
) -> Partial:
    """Fused attention of scaled queries; normalised, so its sum is 1 and its max the log-sum-exp."""
    num_kv, group = q_SKGD.shape[1:3]
    bias = None
    if visible is not None:
        bias = torch.zeros(visible.shape, dtype=q_SKGD.dtype).masked_fill_(~visible, FLOOR)[None, None]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_SKGD.flatten(1, 2).transpose(0, 1)[None],
        k_TKD.transpose(0, 1)[None],
        v_TKD.transpose(0, 1)[None],
        0.0,
        is_causal,
        attn_mask=bias,
        scale=1.0,
    )
    attn = out[0].transpose(0, 1).unflatten(1, (num_kv, group)).float()
    largest = lse[0].transpose(0, 1).unflatten(1, (num_kv, group)).float()
    total = torch.ones_like(largest)
    if visible is not None:
        # A row without any visible key has weighed hidden ones.
        sees_any = visible.any(dim=1)[:, None, None]
        attn = torch.where(sees_any[..., None], attn, 0.0)
        largest = torch.where(sees_any, largest, FLOOR)
        total = torch.where(sees_any, total, 0.0)
    return Partial(attn, largest, total)


def _nothing(q_QKGD: torch.Tensor) -> Partial:
    attn = torch.zeros(q_QKGD.shape, dtype=torch.float32)
    return Partial(attn, torch.full(attn.shape[:-1], FLOOR), torch.zeros(attn.shape[:-1]))


def _put(total: Partial, begin: int, partial: Partial) -> None:
    """Write a slice of queries that had seen nothing so far."""
    for whole, part in zip(total, partial):
        whole[begin : begin + len(part)] = part


def _add(total: Partial, begin: int, partial: Partial) -> None:
    """Merge a slice of queries into what it has seen so far."""
    end = begin + len(partial.max)
    _put(total, begin, merge(Partial(*(x[begin:end] for x in total)), partial))


def _shape_of_partial(q_QKGD: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    attn = q_QKGD.new_empty(q_QKGD.shape, dtype=torch.float32)
    return attn, attn.new_empty(attn.shape[:-1]), attn.new_empty(attn.shape[:-1])


_ROWS = "Tensor row_start, Tensor row_num_new, Tensor row_query_start"
for _name, _arguments, _op in (
    ("causal", f"Tensor q, Tensor k, Tensor v, {_ROWS}, int sink, int recent", _causal_op),
    (
        "shared_blocks",
        f"Tensor q, Tensor k, Tensor v, {_ROWS}, Tensor shared_block, Tensor shared_visible",
        _shared_blocks_op,
    ),
    (
        "shared_rings",
        f"Tensor q, Tensor k, Tensor v, {_ROWS}, "
        "Tensor chunk_row, Tensor chunk_position, int sink, int recent",
        _shared_rings_op,
    ),
):
    _library.define(f"{_name}({_arguments}) -> (Tensor, Tensor, Tensor)")
    _library.impl(_name, _op, "CPU")
    torch.library.register_fake(f"hpu_duo_kernels::{_name}", _shape_of_partial, lib=_library)
