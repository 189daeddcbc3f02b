"""Prompt rows: their own new keys, and their rings.

The functions here run inside operators: they read the plan, loop over rows, and return partials
of all queries, empty where a query takes no part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from bias_builders import Window, sees_streaming
from kernels_ref.partial import Partial, empty
from kernels_ref.sdpa.flash import flash
from kernels_ref.x86 import attention as tiled


class PromptRow(NamedTuple):
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
    rows = list(prompt_rows(row_start, row_num_new, row_query_start, causal_row))
    is_tiled = tiled.fits(q_QKGD, k_QKD)
    fills_step = len(rows) == 1 and (rows[0].begin, rows[0].end) == (0, len(q_QKGD))
    if fills_step and not is_tiled and (window is None or len(q_QKGD) <= window.recent):
        # One prompt without padding, the usual long prefill: its result is the whole result.
        return flash(q_QKGD, k_QKD, v_QKD, is_causal=True)
    total = empty(q_QKGD)
    for row in rows:
        q, k, v = (x[row.begin : row.end] for x in (q_QKGD, k_QKD, v_QKD))
        if is_tiled:
            # Sinks are the first tokens of the request; here keys begin with its first new token.
            band = window and Window(max(0, window.sink - row.start), window.recent)
            tiled.attend(_of_row(total, row), q, k, v, is_causal=True, window=band)
        elif window is None or len(q) <= window.recent:
            _put(total, row.begin, flash(q, k, v, is_causal=True))
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
        yield begin, flash(q[begin:end], k_T, v_T, visible=visible)


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
    for row in prompt_rows(row_start, row_num_new, row_query_start, causal_row):
        if row.start == 0:
            continue
        place = int((chunk_row == row.number).nonzero()[0])
        q = q_QKGD[row.begin : row.end]
        # Slots with a token come first.
        used = int((chunk_position[place] >= 0).sum())
        if not used:
            continue
        held = chunk_position[place, :used]
        k, v = (x[place, :, :used].transpose(0, 1) for x in (k_CKWD, v_CKWD))
        if row.start + len(q) <= window.recent and int(held.max()) < row.start:
            # No token is out of reach for any query.
            if tiled.fits(q, k):
                tiled.attend(_of_row(total, row), q, k, v)
            else:
                _put(total, row.begin, flash(q, k, v))
            continue
        # Only the first tokens of the chunk still reach the recent part; all reach the sinks.
        near = min(len(q), window.recent - 1)
        if near:
            query = torch.arange(row.start, row.start + near, dtype=torch.int32)
            _put(
                total,
                row.begin,
                flash(q[:near], k, v, visible=sees_streaming(query[:, None], held[None], window)),
            )
        num_sinks = min(row.start, sink)
        if near < len(q) and num_sinks:
            _put(total, row.begin + near, flash(q[near:], k[:num_sinks], v[:num_sinks]))
    return total


def prompt_rows(
    row_start: torch.Tensor,
    row_num_new: torch.Tensor,
    row_query_start: torch.Tensor,
    causal_row: torch.Tensor,
) -> Iterator[PromptRow]:
    """The prompt rows of a step."""
    causal = causal_row.index_select(0, row_query_start)
    plan = zip(row_start.tolist(), row_num_new.tolist(), row_query_start.tolist(), causal.tolist())
    for number, (start, num_new, begin, prompt) in enumerate(plan):
        if num_new and prompt == number:
            yield PromptRow(number, begin, begin + num_new, start)


def _of_row(total: Partial, row: PromptRow) -> Partial:
    return Partial(*(x[row.begin : row.end] for x in total))


def _put(total: Partial, begin: int, partial: Partial) -> None:
    """Write a slice of queries that had seen nothing so far."""
    for whole, part in zip(total, partial):
        whole[begin : begin + len(part)] = part
