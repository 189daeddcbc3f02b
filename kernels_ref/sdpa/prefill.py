"""Prompt rows, and decodes that share blocks.

The functions here run inside operators: they read the plan, loop over rows, and return partials
of all queries, empty where a query takes no part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from bias_builders import Window, leading_slots, leading_visible, sees_streaming
from kernels_ref.partial import FLOOR, Partial, attend, empty, merge
from kernels_ref.x86 import attention as tiled


class _Row(NamedTuple):
    """A prompt row: number, flat range ``[begin, end)`` of its new tokens, tokens stored before."""

    number: int
    begin: int
    end: int
    start: int


def causal(
    q_QKGD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    row_start: torch.Tensor,
    row_num_new: torch.Tensor,
    row_query_start: torch.Tensor,
    causal_row: torch.Tensor,
    sink: int,
    recent: int,
    band_queries: int,
) -> Partial:
    """Row by row, causal or in slices of ``band_queries`` of the streaming band."""
    window = Window(sink, recent) if recent else None
    rows = list(_prompt_rows(row_start, row_num_new, row_query_start, causal_row))
    is_tiled = tiled.fits(q_QKGD, k_QKD)
    fills_step = len(rows) == 1 and (rows[0].begin, rows[0].end) == (0, len(q_QKGD))
    if fills_step and not is_tiled and (window is None or len(q_QKGD) <= window.recent):
        # One prompt without padding, the usual long prefill: its result is the whole result.
        return _flash(q_QKGD, k_QKD, v_QKD, is_causal=True)
    total = empty(q_QKGD)
    for row in rows:
        q, k, v = (x[row.begin : row.end] for x in (q_QKGD, k_QKD, v_QKD))
        if is_tiled:
            # Sinks are the first tokens of the request; here keys begin with its first new token.
            band = window and Window(max(0, window.sink - row.start), window.recent)
            tiled.attend(_of_row(total, row), q, k, v, is_causal=True, window=band)
        elif window is None or len(q) <= window.recent:
            _put(total, row.begin, _flash(q, k, v, is_causal=True))
        else:
            for offset, partial in _band(q, k, v, row.start, window, band_queries):
                _put(total, row.begin + offset, partial)
    return total


def _band(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: Window, num_queries: int
) -> Iterator[tuple[int, Partial]]:
    """Slices of ``num_queries`` of a row against the sinks and the band that each can see."""
    position = torch.arange(start, start + len(q), dtype=torch.int32)
    for begin in range(0, len(q), num_queries):
        end = min(begin + num_queries, len(q))
        first = max(0, begin - window.recent + 1)
        # Sinks among the new tokens that lie before the band.
        num_sinks = min(max(0, window.sink - start), first)
        keys = [slice(0, num_sinks), slice(first, end)]
        k_T, v_T, position_T = (torch.cat([x[part] for part in keys]) for x in (k, v, position))
        visible = sees_streaming(position[begin:end, None], position_T[None], window)
        yield begin, _flash(q[begin:end], k_T, v_T, visible=visible)


def shared_blocks(
    q_QKGD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    row_start: torch.Tensor,
    row_num_new: torch.Tensor,
    row_query_start: torch.Tensor,
    causal_row: torch.Tensor,
    shared_block: torch.Tensor,
    shared_start: torch.Tensor,
    shared_reads: torch.Tensor,
    context_blocks: int,
) -> Partial:
    """Row by row over the gathered context, ``context_blocks`` at a time."""
    shared_visible = leading_visible(shared_start, row_start[:, None], k_XKBD.shape[2]) * shared_reads[:-1]
    total = empty(q_QKGD)
    for row in _prompt_rows(row_start, row_num_new, row_query_start, causal_row):
        visible = shared_visible[row.number]
        seen = visible.nonzero().flatten()
        q = q_QKGD[row.begin : row.end]
        # An empty tensor splits into one empty part, and flash attention needs a key.
        for part in seen.split(context_blocks) if len(seen) else ():
            k, v = _as_keys(k_XKBD, v_XKBD, shared_block[part], visible[part])
            if tiled.fits(q, k):
                tiled.attend(_of_row(total, row), q, k, v)
            else:
                _add(total, row.begin, _flash(q, k, v))
            # What one part has gathered is gone before the next one gathers.
            del k, v
    rows = row_num_new, row_query_start, causal_row
    _add_decodes(total, q_QKGD, k_XKBD, v_XKBD, *rows, shared_block, shared_visible, context_blocks)
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


def _add_decodes(
    total: Partial,
    q_QKGD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    row_num_new: torch.Tensor,
    row_query_start: torch.Tensor,
    causal_row: torch.Tensor,
    shared_block: torch.Tensor,
    shared_visible: torch.Tensor,
    context_blocks: int,
) -> None:
    """Decodes that share blocks: few queries, so one masked product over all of them."""
    number = torch.arange(len(row_num_new), dtype=torch.int32)
    is_decode = (row_num_new > 0) & (causal_row.index_select(0, row_query_start) != number)
    visible_rows = shared_visible * is_decode[:, None]
    rows = visible_rows.any(dim=1).nonzero().flatten()
    seen = visible_rows.any(dim=0).nonzero().flatten()
    if not len(rows):
        return
    block_size = k_XKBD.shape[2]
    # All tokens of a row see the same: what several rows read was there before the step.
    plan = zip(row_query_start[rows].tolist(), row_num_new[rows].tolist())
    query = torch.cat([torch.arange(begin, begin + num_new) for begin, num_new in plan])
    rows = rows.repeat_interleave(row_num_new[rows])
    q_KGND = q_QKGD.index_select(0, query).permute(1, 2, 0, 3)
    for part in seen.split(context_blocks):
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
            whole.index_copy_(0, query, merged)


def shared_rings(
    q_QKGD: torch.Tensor,
    k_CKWD: torch.Tensor,
    v_CKWD: torch.Tensor,
    row_start: torch.Tensor,
    row_num_new: torch.Tensor,
    row_query_start: torch.Tensor,
    causal_row: torch.Tensor,
    chunk_row: torch.Tensor,
    chunk_position: torch.Tensor,
    sink: int,
    recent: int,
) -> Partial:
    """Row by row over what its ring held before the step."""
    window = Window(sink, recent)
    total = empty(q_QKGD)
    for row in _prompt_rows(row_start, row_num_new, row_query_start, causal_row):
        if row.start == 0:
            continue
        place = int((chunk_row == row.number).nonzero()[0])
        q = q_QKGD[row.begin : row.end]
        used = min(row.start, k_CKWD.shape[2])
        k, v = (x[place, :, :used].transpose(0, 1) for x in (k_CKWD, v_CKWD))
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


def _prompt_rows(
    row_start: torch.Tensor,
    row_num_new: torch.Tensor,
    row_query_start: torch.Tensor,
    causal_row: torch.Tensor,
) -> Iterator[_Row]:
    causal = causal_row.index_select(0, row_query_start)
    plan = zip(row_start.tolist(), row_num_new.tolist(), row_query_start.tolist(), causal.tolist())
    for number, (start, num_new, begin, prompt) in enumerate(plan):
        if num_new and prompt == number:
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
    group = q_SKGD.shape[2]
    bias = None
    if visible is not None:
        # The kernel adds the bias in the dtype of the queries; float16 ends before our floor.
        lowest = max(FLOOR, torch.finfo(q_SKGD.dtype).min)
        bias = torch.zeros(visible.shape, dtype=q_SKGD.dtype).masked_fill_(~visible, lowest)[None, None]
    # Groups are the batch, over the same keys: given fewer key heads, torch 2.7 reads beyond them.
    out_GKSD, lse_GKS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_SKGD.permute(2, 1, 0, 3),
        k_TKD.transpose(0, 1).expand(group, -1, -1, -1),
        v_TKD.transpose(0, 1).expand(group, -1, -1, -1),
        0.0,
        is_causal,
        attn_mask=bias,
        scale=1.0,
    )
    attn = out_GKSD.permute(2, 1, 0, 3).contiguous().float()
    largest = lse_GKS.permute(2, 1, 0).contiguous().float()
    total = torch.ones_like(largest)
    if visible is not None:
        # A row without any visible key has weighed hidden ones.
        sees_any = visible.any(dim=1)[:, None, None]
        attn = torch.where(sees_any[..., None], attn, 0.0)
        largest = torch.where(sees_any, largest, FLOOR)
        total = torch.where(sees_any, total, 0.0)
    return Partial(attn, largest, total)


def _of_row(total: Partial, row: _Row) -> Partial:
    return Partial(*(x[row.begin : row.end] for x in total))


def _put(total: Partial, begin: int, partial: Partial) -> None:
    """Write a slice of queries that had seen nothing so far."""
    for whole, part in zip(total, partial):
        whole[begin : begin + len(part)] = part


def _add(total: Partial, begin: int, partial: Partial) -> None:
    """Merge a slice of queries into what it has seen so far."""
    end = begin + len(partial.max)
    _put(total, begin, merge(Partial(*(x[begin:end] for x in total)), partial))
