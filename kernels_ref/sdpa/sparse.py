"""Sparse attention on CPU: only tiles and blocks are read in which something may be visible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from bias_builders import NOWHERE, Leading, Rule, Tile, TopBlocks, decode_rule, leading_visible, seen_mask
from kernels_ref.pages import best_pages
from kernels_ref.partial import Partial, Scoring, empty, merge, soften
from kernels_ref.reference import merge_by_owner, own_units, side_by_side
from kernels_ref.sdpa.prefill import flash, prompt_rows
from kernels_ref.sparse import estimate, picked, slot_positions, tails_visible, whole_visible
from kernels_ref.x86 import library as x86

KEY_TILE = 128
"""Number of new keys that are read or skipped together."""

_Ints: TypeAlias = npt.NDArray[np.int64]


class _Tiles(NamedTuple):
    """Keys and values of some tiles side by side, and their positions, -1 for unused slots."""

    k: torch.Tensor
    v: torch.Tensor
    position: torch.Tensor


_Keys: TypeAlias = Callable[[_Ints], _Tiles]
"""From indices of tiles to their content."""


def sparse_causal(
    q_QKGD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    row_start: torch.Tensor,
    row_num_new: torch.Tensor,
    row_query_start: torch.Tensor,
    causal_row: torch.Tensor,
    rule: Sequence[int],
    band_queries: int,
) -> Partial:
    """Row by row, ``band_queries`` queries at a time."""
    read, total = _read(rule), empty(q_QKGD, v_QKD.shape[-1])
    for row in prompt_rows(row_start, row_num_new, row_query_start, causal_row):
        k, v = k_QKD[row.begin : row.end], v_QKD[row.begin : row.end]
        position = torch.arange(row.start, row.start + len(k), dtype=torch.int32)
        for begin in range(0, len(k), band_queries):
            end = min(begin + band_queries, len(k))
            keys = _Tiles(k[:end], v[:end], position[:end])
            first = np.arange(0, end, KEY_TILE) + row.start
            last = np.minimum(first + KEY_TILE, row.start + end) - 1
            place = slice(row.begin + begin, row.begin + end)
            seen = Partial(*(x[place] for x in total))
            keys_of = partial(_new_keys, keys)
            _attend_tiles(seen, q_QKGD[place], position[begin:end], read, (first, last), keys_of, len(first))
    return total


def _new_keys(keys: _Tiles, tiles: _Ints) -> _Tiles:
    """Some tiles of new keys: a view if they are contiguous."""
    first = tiles[np.flatnonzero(np.diff(tiles, prepend=-2) > 1)].tolist()
    last = tiles[np.flatnonzero(np.diff(tiles, append=tiles[-1] + 2) > 1)].tolist()
    places = [slice(a * KEY_TILE, (b + 1) * KEY_TILE) for a, b in zip(first, last)]
    return _Tiles(*(picked(x, places) for x in keys))


def sparse_shared(
    q_QKGD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    row_start: torch.Tensor,
    row_num_new: torch.Tensor,
    row_query_start: torch.Tensor,
    shared_block: torch.Tensor,
    shared_start: torch.Tensor,
    shared_reads: torch.Tensor,
    rule: Sequence[int],
    band_queries: int,
    context_blocks: int,
) -> Partial:
    """Row by row, over the blocks that its queries may see some of."""
    read, num_slots = _read(rule), k_XKBD.shape[2]
    total = empty(q_QKGD, v_XKBD.shape[-1])
    visible_RX = leading_visible(shared_start, row_start[:, None], num_slots) * shared_reads[:-1]
    plan = zip(row_start.tolist(), row_num_new.tolist(), row_query_start.tolist())
    for number, (start, num_new, row_begin) in enumerate(plan):
        index = visible_RX[number].nonzero().flatten()
        if not num_new or not len(index):
            continue
        block, used = shared_block[index], visible_RX[number][index]
        first = shared_start[index].numpy().astype(np.int64)
        blocks = _Blocks(k_XKBD, v_XKBD, block, shared_start[index], used)
        for begin in range(0, num_new, band_queries):
            end = min(begin + band_queries, num_new)
            place = slice(row_begin + begin, row_begin + end)
            position = torch.arange(start + begin, start + end, dtype=torch.int32)
            seen = Partial(*(x[place] for x in total))
            ends = first, first + used.numpy() - 1
            is_whole = used.numpy() == num_slots
            keys_of = partial(_block_keys, blocks)
            _attend_tiles(seen, q_QKGD[place], position, read, ends, keys_of, context_blocks, is_whole)
    return total


class _Blocks(NamedTuple):
    """Blocks that a row reads: their ids, the positions of their first slots, and the slots that it sees."""

    k_XKBD: torch.Tensor
    v_XKBD: torch.Tensor
    block: torch.Tensor
    start: torch.Tensor
    used: torch.Tensor


def _block_keys(blocks: _Blocks, tiles: _Ints) -> _Tiles:
    """Some of the blocks, gathered."""
    some, num_slots = torch.from_numpy(tiles), blocks.k_XKBD.shape[2]
    block, start, used = (x[some] for x in blocks[2:])
    k, v = (x.index_select(0, block).transpose(1, 2).flatten(0, 1) for x in blocks[:2])
    slots = slot_positions(start, num_slots)
    position = torch.where(slots < (start + used)[:, None], slots, -1).flatten()
    if bool((used < num_slots).any()):
        # An unused slot is undefined, and NaN times a weight of 0 is NaN.
        k, v = (torch.where((position >= 0)[:, None, None], x, 0) for x in (k, v))
    return _Tiles(k, v, position)


def sparse_unique(
    q_NKHD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    owner: torch.Tensor,
    owner_start: torch.Tensor,
    tail_block: torch.Tensor,
    tail_start: torch.Tensor,
    tail_visible: torch.Tensor,
    end: torch.Tensor,
    rule: Sequence[int],
    softcap: float,
    decode_slots: int,
) -> Partial:
    """Decode rows against the blocks of which a token sees some slots, ``decode_slots`` at a time."""
    read, scoring, num_slots = _read(rule), Scoring(softcap or None), k_XKBD.shape[2]
    k, v = (
        side_by_side(x.index_select(0, tail_block.view(-1)), tail_block.shape[1]) for x in (k_XKBD, v_XKBD)
    )
    visible = seen_mask(Leading(tail_visible), num_slots) & tails_visible(read, end, tail_start, num_slots)
    total = own_units(q_NKHD, k, v, visible, scoring)
    group = q_NKHD.shape[2] // end.shape[1]
    seen = _blocks_seen(read, owner.numpy(), owner_start.numpy(), end.numpy(), num_slots)
    for some in seen.split(max(1, decode_slots // num_slots)) if len(seen) else ():
        of = owner[some]
        visible_XMB = whole_visible(read, end, of, owner_start[some], num_slots)
        of_heads = visible_XMB.repeat_interleave(group, dim=1)[:, None]
        k, v = _units(k_XKBD, some), _units(v_XKBD, some)
        scores = soften(torch.matmul(q_NKHD.index_select(0, of), k.transpose(2, 3)), scoring)
        total = merge_by_owner(total, scores, v, of, of_heads)
    return total


def _blocks_seen(
    rule: Rule,
    owner: npt.NDArray[np.int32],
    start: npt.NDArray[np.int32],
    end_NM: npt.NDArray[np.int32],
    num_slots: int,
) -> torch.Tensor:
    """Whole blocks of which the tokens of the row that owns them may see some slots, ascending."""
    num_rows = len(end_NM)
    row = np.minimum(owner, num_rows - 1)
    # An owner has at least one token; missing tokens have end 0.
    first, last = np.where(end_NM > 0, end_NM, NOWHERE).min(axis=1), end_NM.max(axis=1)
    tile = Tile(first[row] - 1, last[row] - 1, start, start + num_slots - 1)
    return torch.from_numpy(np.flatnonzero((owner < num_rows) & rule.may_see(tile)))


def _units(x_XKBD: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
    """Some units, ascending: a view if they are contiguous."""
    first, last = int(some[0]), int(some[-1])
    return x_XKBD[first : last + 1] if last - first + 1 == len(some) else x_XKBD.index_select(0, some)


def _attend_tiles(
    seen: Partial,
    q_SKGD: torch.Tensor,
    position_S: torch.Tensor,
    rule: Rule,
    ends: tuple[_Ints, _Ints],
    keys_of: _Keys,
    num_together: int,
    is_whole: npt.NDArray[np.bool_] | None = None,
) -> None:
    """Merge attention of neighbouring queries to some tiles of keys into ``seen``.

    Args:
        ends: first and last position of each tile.
        num_together: most tiles that are read at a time.
        is_whole: tiles whose slots are all used; None = all.
    """
    tile = Tile(int(position_S[0]), int(position_S[-1]), *ends)
    may, full = rule.may_see(tile), rule.sees_all(tile)
    if is_whole is not None:
        full = full & is_whole
    for masked, chosen in ((False, may & full), (True, may & ~full)):
        tiles = np.flatnonzero(chosen)
        for begin in range(0, len(tiles), num_together):
            k, v, key_position = keys_of(tiles[begin : begin + num_together])
            visible = None
            if not masked and x86.fits_tiles(q_SKGD, k, v):
                x86.attend(seen, q_SKGD, k, v)
                continue
            if masked:
                visible = rule.sees(position_S[:, None], key_position[None]) & (key_position >= 0)[None]
            for whole, merged in zip(seen, merge(seen, flash(q_SKGD, k, v, visible=visible))):
                whole.copy_(merged)


def _read(numbers: Sequence[int]) -> Rule:
    rule = decode_rule(numbers)
    assert rule is not None, "expected a rule"
    return rule


def chosen_blocks(
    q_QKGD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    row_start: torch.Tensor,
    row_num_new: torch.Tensor,
    row_query_start: torch.Tensor,
    causal_row: torch.Tensor,
    write_block: torch.Tensor,
    shared_block: torch.Tensor,
    shared_start: torch.Tensor,
    shared_reads: torch.Tensor,
    num_blocks: int,
    context_blocks: int,
) -> Partial:
    """Row by row and tile by tile: its own block, causal, and those before it that are chosen."""
    total, choice = empty(q_QKGD, v_XKBD.shape[-1]), TopBlocks(num_blocks)
    block_size = k_XKBD.shape[2]
    for row in prompt_rows(row_start, row_num_new, row_query_start, causal_row):
        assert row.start % block_size == 0, f"expected a chunk to begin at a block border, got {row.start}"
        reads = (shared_reads[row.number] > 0) & (shared_start < row.start)
        before = shared_block[reads][torch.argsort(shared_start[reads])]
        # In the order of the text, so that a block's index is its place.
        block_X = torch.cat([before, write_block[row.begin : row.end : block_size]])
        chosen_TKX = _choose(q_QKGD[row.begin : row.end], k_XKBD, block_X, choice, context_blocks)
        for number, chosen_KX in enumerate(chosen_TKX):
            begin = row.begin + number * block_size
            place = slice(begin, min(begin + block_size, row.end))
            seen, q = Partial(*(x[place] for x in total)), q_QKGD[place]
            own = block_X[len(before) + number]
            k, v = (x[own, :, : len(q)].transpose(0, 1) for x in (k_XKBD, v_XKBD))
            _merge_into(seen, q, k, v, is_causal=True)
            _attend_chosen(seen, q, k_XKBD, v_XKBD, block_X, chosen_KX, context_blocks)
    return total


def _choose(
    q_QKGD: torch.Tensor,
    k_XKBD: torch.Tensor,
    block_X: torch.Tensor,
    choice: TopBlocks,
    context_blocks: int,
) -> torch.Tensor:
    """Blocks of a row that each tile of its new tokens sees before its own, bool ``[T, K, X]``."""
    block_size, num_blocks = k_XKBD.shape[2], len(block_X)
    num_whole, num_tiles = len(q_QKGD) // block_size, -(-len(q_QKGD) // block_size)
    number = torch.arange(num_blocks, dtype=torch.int32)
    tile = number[num_blocks - num_tiles :]
    may_TX = number < tile[:, None]
    seen = may_TX[:, None].repeat(1, k_XKBD.shape[1], 1)
    if num_whole and num_blocks > choice.num_blocks:
        q = q_QKGD[: num_whole * block_size].unflatten(0, (num_whole, block_size)).float().mean(dim=1)
        parts = (k_XKBD.index_select(0, some) for some in block_X.split(context_blocks))
        k = torch.cat([part.mean(dim=2, dtype=torch.float32) for part in parts])
        may, tile = may_TX[:num_whole], tile[:num_whole]
        seen[:num_whole] = choice.chosen(estimate(q, k, may, Scoring()), may, tile, number)
    return seen


def _attend_chosen(
    seen: Partial,
    q_SKGD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    block_X: torch.Tensor,
    chosen_KX: torch.Tensor,
    context_blocks: int,
) -> None:
    """Merge attention of a tile to blocks before it: equally many in each head, some at a time."""
    num_heads = len(chosen_KX)
    place_KC = chosen_KX.nonzero()[:, 1].view(num_heads, -1)
    head_K1 = torch.arange(num_heads)[:, None]
    for place in place_KC.split(context_blocks, dim=1) if place_KC.numel() else ():
        block = block_X[place].long()
        k, v = (x[block, head_K1].flatten(1, 2).transpose(0, 1) for x in (k_XKBD, v_XKBD))
        _merge_into(seen, q_SKGD, k, v)


def _merge_into(
    seen: Partial, q_SKGD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, *, is_causal: bool = False
) -> None:
    if x86.fits_tiles(q_SKGD, k_TKD, v_TKD):
        x86.attend(seen, q_SKGD, k_TKD, v_TKD, is_causal=is_causal)
        return
    for whole, merged in zip(seen, merge(seen, flash(q_SKGD, k_TKD, v_TKD, is_causal=is_causal))):
        whole.copy_(merged)


def chosen_pages(
    q_NKGD: torch.Tensor,
    low_XKD: torch.Tensor,
    high_XKD: torch.Tensor,
    table_NL: torch.Tensor,
    number_N: torch.Tensor,
    stored_NKP: torch.Tensor | None,
    is_due_N: torch.Tensor | None,
    most: int,
) -> torch.Tensor:
    """Row by row, over the blocks of its text."""
    found = (
        torch.empty((*q_NKGD.shape[:2], most), dtype=torch.int32)
        if stored_NKP is None
        else stored_NKP.clone()
    )
    for row, count in enumerate(number_N.tolist()):
        if is_due_N is None or is_due_N[row]:
            own = slice(row, row + 1)
            numbers = table_NL[own, :count], number_N[own], most
            found[own] = best_pages(q_NKGD[own], low_XKD, high_XKD, *numbers)
    return found
