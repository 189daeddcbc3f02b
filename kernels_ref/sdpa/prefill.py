"""Prompt rows: their own new keys, their rings, and blocks that several rows read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from bias_builders import Window, leading_visible, sees_streaming
from kernels_ref.partial import FLOOR, Partial, empty, merge
from kernels_ref.x86 import library as x86


def flash(
    q_SKGD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    *,
    is_causal: bool = False,
    visible: torch.Tensor | None = None,
) -> Partial:
    """Fused attention of scaled queries; normalised, so its sum is 1 and its max the log-sum-exp."""
    (group, key_dim), value_dim = q_SKGD.shape[2:], v_TKD.shape[-1]
    if key_dim != value_dim:
        # torch's operator has one head size; zeros change neither scores nor results.
        most = max(key_dim, value_dim)
        q_SKGD, k_TKD, v_TKD = (pad(x, (0, most - x.shape[-1])) for x in (q_SKGD, k_TKD, v_TKD))
    bias = None
    if visible is not None:
        # The kernel adds the bias in the dtype of the queries; float16 ends before our floor.
        lowest = max(FLOOR, torch.finfo(q_SKGD.dtype).min)
        bias = torch.zeros(visible.shape, dtype=q_SKGD.dtype).masked_fill_(~visible, lowest)[None, None]
    # Groups are the batch, over the same keys: with fewer key heads, torch 2.7 reads out of bounds.
    out_GKSD, lse_GKS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_SKGD.permute(2, 1, 0, 3),
        k_TKD.transpose(0, 1).expand(group, -1, -1, -1),
        v_TKD.transpose(0, 1).expand(group, -1, -1, -1),
        0.0,
        is_causal,
        attn_mask=bias,
        scale=1.0,
    )
    attn = out_GKSD[..., :value_dim].permute(2, 1, 0, 3).contiguous().float()
    largest = lse_GKS.permute(2, 1, 0).contiguous().float()
    total = torch.ones_like(largest)
    if visible is not None:
        # The result of a row without any visible key is made of hidden keys.
        sees_any = visible.any(dim=1)[:, None, None]
        attn = torch.where(sees_any[..., None], attn, 0.0)
        largest = torch.where(sees_any, largest, FLOOR)
        total = torch.where(sees_any, total, 0.0)
    return Partial(attn, largest, total)


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
    is_tiled = x86.fits_tiles(q_QKGD, k_QKD, v_QKD)
    fills_step = len(rows) == 1 and (rows[0].begin, rows[0].end) == (0, len(q_QKGD))
    if fills_step and not is_tiled and (window is None or len(q_QKGD) <= window.recent):
        # One prompt without padding, the usual long prefill: its result is the whole result.
        return flash(q_QKGD, k_QKD, v_QKD, is_causal=True)
    total = empty(q_QKGD, v_QKD.shape[-1])
    for row in rows:
        q, k, v = (x[row.begin : row.end] for x in (q_QKGD, k_QKD, v_QKD))
        if is_tiled:
            # Sinks are the first tokens of the request; here keys begin with its first new token.
            band = window and Window(max(0, window.sink - row.start), window.recent)
            x86.attend(_of_row(total, row), q, k, v, is_causal=True, window=band)
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
    """Row by row over its ring as of before the step."""
    window = Window(sink, recent)
    total = empty(q_QKGD, v_CKWD.shape[-1])
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
            if x86.fits_tiles(q, k, v):
                x86.attend(_of_row(total, row), q, k, v)
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
    """Write a slice of queries with empty partials so far."""
    for whole, part in zip(total, partial):
        whole[begin : begin + len(part)] = part


_Ints = npt.NDArray[np.int32] | npt.NDArray[np.int64]


def shared_blocks(
    q_QKGD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    row_start: torch.Tensor,
    row_num_new: torch.Tensor,
    row_query_start: torch.Tensor,
    shared_block: torch.Tensor,
    shared_start: torch.Tensor,
    shared_reads: torch.Tensor,
    context_blocks: int,
) -> Partial:
    """Every row over the gathered blocks that it sees, ``context_blocks`` at a time."""
    # All tokens of a row see the same: shared blocks were filled before the step.
    visible_RX = leading_visible(shared_start, row_start[:, None], k_XKBD.shape[2]) * shared_reads[:-1]
    total = empty(q_QKGD, v_XKBD.shape[-1])
    tokens = TokenPlaces(row_query_start.numpy(), row_num_new.numpy())
    for readers in readers_of(visible_RX.numpy() * (row_num_new.numpy() > 0)[:, None]):
        place = tokens.of(readers.rows)
        q, seen = _taken(q_QKGD, place), Partial(*(_taken(x, place) for x in total))
        block = shared_block[torch.from_numpy(readers.blocks)]
        for part in block.split(context_blocks):
            # Gathered copies of one part are freed before those of the next one.
            k, v = (_slots(x, part, readers.num_slots) for x in (k_XKBD, v_XKBD))
            if x86.fits_tiles(q, k, v):
                x86.attend(seen, q, k, v)
            else:
                for whole, merged in zip(seen, merge(seen, flash(q, k.to(q.dtype), v.to(q.dtype)))):
                    whole.copy_(merged)
            del k, v
        if isinstance(place, torch.Tensor):
            for whole, one in zip(total, seen):
                whole.index_copy_(0, place, one)
    return total


class Readers(NamedTuple):
    """Rows that see the same leading slots of some blocks.

    Attributes:
        rows, blocks: ascending, the latter as places in the list of shared blocks.
        num_slots: that they see of each block.
    """

    rows: tuple[int, ...]
    blocks: npt.NDArray[np.int64]
    num_slots: int


def readers_of(visible_RX: _Ints) -> Iterator[Readers]:
    """Group blocks by rows and visible slots; every visible pair of a row and a block occurs once."""
    if not visible_RX.size:
        return
    # Neighbours mostly have the same readers, so there are few runs, however many blocks there are.
    is_first = np.ones(visible_RX.shape[1], bool)
    is_first[1:] = (visible_RX[:, 1:] != visible_RX[:, :-1]).any(axis=0)
    bounds = [*np.flatnonzero(is_first).tolist(), visible_RX.shape[1]]
    found: dict[tuple[int, tuple[int, ...]], list[npt.NDArray[np.int64]]] = {}
    for begin, end in itertools.pairwise(bounds):
        column = visible_RX[:, begin]
        for num_slots in set(column[column > 0].tolist()):
            rows = tuple(np.flatnonzero(column == num_slots).tolist())
            found.setdefault((num_slots, rows), []).append(np.arange(begin, end))
    for (num_slots, rows), runs in found.items():
        yield Readers(rows, np.concatenate(runs), num_slots)


class TokenPlaces:
    """Places of the tokens of rows in a step."""

    def __init__(self, query_start: _Ints, num_new: _Ints) -> None:
        self._begin, self._end = query_start, query_start + num_new

    def of(self, rows: Sequence[int]) -> slice | torch.Tensor:
        """Places of the tokens of some rows: a slice if they are contiguous."""
        begins, ends = ([int(x[row]) for row in rows] for x in (self._begin, self._end))
        if begins[1:] == ends[:-1]:
            return slice(begins[0], ends[-1])
        return torch.from_numpy(np.concatenate([np.arange(*pair) for pair in zip(begins, ends)]))


def _taken(tensor: torch.Tensor, place: slice | torch.Tensor) -> torch.Tensor:
    """Some tokens: a view for a slice, else a copy."""
    return tensor[place] if isinstance(place, slice) else tensor.index_select(0, place)


def _slots(x_XKBD: torch.Tensor, block: torch.Tensor, num_slots: int) -> torch.Tensor:
    """The leading slots of some blocks, concatenated, ``[T, K, D]``."""
    return x_XKBD.index_select(0, block)[:, :, :num_slots].transpose(1, 2).flatten(0, 1)


def column_sums(
    q_QKGD: torch.Tensor,
    lse_QKG: torch.Tensor,
    k_QKD: torch.Tensor,
    slots_PKCD: torch.Tensor | None,
    start: torch.Tensor,
    num_new: torch.Tensor,
    token: torch.Tensor,
    num_observed: int | None,
) -> torch.Tensor:
    """See ``kernels_ref.groups.column_sums``; the last arguments are those of its ``ChunkStep``."""
    num_slots = 0 if slots_PKCD is None else slots_PKCD.shape[2]
    num_rows, most_new = token.shape
    total = q_QKGD.new_zeros(num_rows, k_QKD.shape[1], num_slots + most_new, dtype=torch.float32)
    plan = zip(start.tolist(), num_new.tolist(), token[:, 0].tolist())
    for row, (num_before, new, begin) in enumerate(plan):
        counted = new if num_observed is None else min(num_observed, new)
        first, end = begin + new - counted, begin + new
        q, lse = q_QKGD[first:end], lse_QKG[first:end]
        stored = min(num_before, num_slots)
        if slots_PKCD is not None and stored:
            held = slots_PKCD[row, :, :stored].transpose(0, 1)
            total[row, :, :stored] = x86.column_sums(q, held, lse)
        if new:
            own = x86.column_sums(q, k_QKD[begin:end], lse, offset=new - counted)
            total[row, :, num_slots : num_slots + new] = own
    return total


def shapes(
    q_QKGD: torch.Tensor,
    lse_QKG: torch.Tensor,
    k_QKD: torch.Tensor,
    slots_PKCD: torch.Tensor | None,
    start: torch.Tensor,
    num_new: torch.Tensor,
    token: torch.Tensor,
    num_observed: int | None,
) -> torch.Tensor:
    """An empty tensor of the shape of the sums."""
    num_slots = 0 if slots_PKCD is None else slots_PKCD.shape[2]
    size = (token.shape[0], k_QKD.shape[1], num_slots + token.shape[1])
    return q_QKGD.new_empty(size, dtype=torch.float32)
