"""Sparse attention in portable torch: blocks chosen on the device, and visibility by rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from bias_builders import Rule, TopBlocks, Window, causal_mask, leading_slots
from kernels_ref.chunks import QUERY_STEP, num_parts
from kernels_ref.partial import FLOOR, Partial, Scoring, attend, empty, merge, soften
from kernels_ref.step import PartInputs, StepTensors
from kernels_ref.units import gather

MASK_BYTES = 16
"""Bytes of intermediates of a rule per query and key: distances, remainders and booleans."""


def reached_keys(rule: Rule | None, begin: int, end: int, tile: int = QUERY_STEP) -> list[slice]:
    """Places of the new keys that the new queries ``[begin, end)`` may see, by their distance alone.

    Tokens of a row are contiguous, so distances of places are distances of tokens. Ascending, not empty, up
    to ``end``. Sinks before the first of them are excluded; there is no gap if a rule has sinks.

    Args:
        tile: number of keys that are included or excluded together.
    """
    if rule is None:
        return [slice(0, end)]
    if isinstance(rule, Window):
        return [slice(max(0, begin - rule.recent + 1), end)]
    found: list[slice] = []
    for first in range(0, end, tile):
        stop = min(first + tile, end)
        is_gap = not rule.reaches(max(0, begin - stop + 1), end - 1 - first)
        if is_gap and not (found and rule.sink):
            continue
        if found and found[-1].stop == first:
            first = found.pop().start
        found.append(slice(first, stop))
    return found


def picked(x: torch.Tensor, places: list[slice]) -> torch.Tensor:
    """Some entries of the first dimension: a view if they are contiguous."""
    return x[places[0]] if len(places) == 1 else torch.cat([x[place] for place in places])


Tiles: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Scoring], Partial]
"""Slices of queries ``[X, Q, K, G, D]`` against keys and values of each, ``[X, T, K, D]``, under masks."""


def band(inputs: PartInputs, size: int, attend: Tiles) -> Partial:
    """Tokens of prompt rows against the new keys in their window, all slices of queries at once.

    A slice has as many keys as its queries reach, and the sinks of the one row that may have begun before
    them. Those that are no keys, before the first token and after the last one, are hidden.

    Args:
        size: queries of a slice.
        attend: how slices attend.
    """
    q_QKGD, new, _, t, scoring, _, _ = inputs
    window, num_queries, no_row = inputs.window, len(q_QKGD), t.row_start.shape[0]
    options: Any = {"dtype": t.causal_row.dtype, "device": q_QKGD.device}
    num_slices = num_parts(num_queries, size)
    begin_X1 = torch.arange(num_slices, **options)[:, None] * size - (window.recent - 1)
    key_XT = begin_X1 + torch.arange(size + window.recent - 1, **options)
    exists_XT = (key_XT >= 0) & (key_XT < num_queries)
    if window.sink:
        owner_X = gather(t.causal_row, begin_X1[:, 0].clamp(min=0))
        row_begin = torch.cat([t.row_query_start, t.row_query_start.new_zeros(1)])
        sink_XT = gather(row_begin, owner_X)[:, None] + torch.arange(window.sink, **options)
        exists_XT = torch.cat([sink_XT < begin_X1, exists_XT], dim=1)
        key_XT = torch.cat([sink_XT, key_XT], dim=1)
    key = key_XT.clamp(0, num_queries - 1).view(-1)
    q, row, position = q_QKGD, t.causal_row, t.positions
    if num_slices * size > num_queries:
        place = torch.arange(num_slices * size, **options).clamp(max=num_queries - 1)
        q, row, position = gather(q, place), gather(row, place), gather(position, place)
    visible_XQT = causal_mask(
        row.view(num_slices, size),
        position.view(num_slices, size),
        torch.where(exists_XT, gather(t.causal_row, key).view_as(key_XT), no_row),
        gather(t.positions, key).view_as(key_XT),
        no_row,
        window,
    )
    k, v = (gather(x, key).unflatten(0, key_XT.shape) for x in new)
    partial = attend(q.unflatten(0, (num_slices, size)), k, v, visible_XQT, scoring)
    return Partial(*(x.flatten(0, 1)[:num_queries] for x in partial))


def slot_positions(start_X: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Positions in the slots of blocks that begin at ``start_X``, ``[X, B]``."""
    return start_X[..., None] + torch.arange(num_slots, dtype=start_X.dtype, device=start_X.device)


def shared_visible(
    rule: Rule, position_Q: torch.Tensor, start_X: torch.Tensor, num_slots: int
) -> torch.Tensor:
    """Slots of shared blocks that a rule shows each query, ``[Q, X, B]``, stored or not."""
    return rule.sees(position_Q[:, None, None], slot_positions(start_X, num_slots)[None])


def whole_visible(
    rule: Rule, end_NM: torch.Tensor, owner: torch.Tensor, start_X: torch.Tensor, num_slots: int
) -> torch.Tensor:
    """Slots of whole unique blocks that a rule shows each token of the row that owns them, ``[X, M, B]``.

    Args:
        end_NM: position behind each token, 0 where there is none.
        owner: row of each block, ``N`` = nobody, whose tokens here are anybody's.
    """
    last = end_NM.shape[0] - 1
    position_XM = gather(end_NM, torch.clamp(owner, max=last)) - 1
    return rule.sees(position_XM[:, :, None], slot_positions(start_X, num_slots)[:, None])


def tails_visible(rule: Rule, end_NM: torch.Tensor, start_NT: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Slots of the tails of rows that a rule shows each of their tokens, ``[N, 1, M, T * B]``."""
    key = slot_positions(start_NT, num_slots).flatten(1)
    return rule.sees((end_NM - 1)[:, None, :, None], key[:, None, None])


def as_keys(
    k_XKBD: torch.Tensor, v_XKBD: torch.Tensor, used_XB: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathered units as one list of keys and values ``[T, K, D]``; unused slots become zero."""
    keep = used_XB[:, None, :, None]
    k, v = torch.where(keep, k_XKBD, 0), torch.where(keep, v_XKBD, 0)
    return k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)


def attend_dense(
    q_QKGD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    visible_QT: torch.Tensor,
    scoring: Scoring,
) -> Partial:
    """Queries against one list of keys; the G heads of a group share a product.

    Args:
        visible_QT: the same for all key/value heads, or ``[K, Q, T]``.
    """
    num_queries, num_kv, group, dim = q_QKGD.shape
    q_KSD = q_QKGD.transpose(0, 1).reshape(num_kv, num_queries * group, dim)
    scores = soften(torch.matmul(q_KSD, k_TKD.permute(1, 2, 0)), scoring)
    partial = attend(
        scores.view(num_kv, num_queries, group, -1).flatten(1, 2),
        visible_QT.repeat_interleave(group, dim=-2) if group > 1 else visible_QT,
        v_TKD.transpose(0, 1),
    )
    return Partial(*(x.unflatten(1, (num_queries, group)).transpose(0, 1) for x in partial))


class TileStep(NamedTuple):
    """Tiles of the new tokens of prompt rows; T is fixed by the numbers of tokens and of rows.

    Attributes:
        of_token: tile of each token, ``T`` for tokens of no prompt row, int32 ``[Q]``.
        share: of each token in the means of its tile, float32 ``[T, Q]``.
        number: of each tile in its text, int32 ``[T]``.
        is_whole: whether all its tokens are new ones, bool ``[T]``.
        block: numbers of the blocks of keys in their texts, int32 ``[X]``.
        may: whether a tile and a block are of the same text, and the block comes before it, bool ``[T, X]``.
        decode_reads: who reads which shared block, without prompt rows, int32 ``[N + 1, S]``.
    """

    of_token: torch.Tensor
    share: torch.Tensor
    number: torch.Tensor
    is_whole: torch.Tensor
    block: torch.Tensor
    may: torch.Tensor
    decode_reads: torch.Tensor


def num_tiles(num_queries: int, num_rows: int, block_size: int) -> int:
    """Most tiles (T) that so many new tokens of so many rows have: one that is not whole for each row."""
    return num_queries // block_size + min(num_queries, num_rows)


def tile_step(t: StepTensors, block_size: int) -> TileStep:
    """Find the tiles of a step."""
    no_row, num_queries, device = t.row_start.shape[0], t.positions.shape[0], t.positions.device
    tiles = num_tiles(num_queries, no_row, block_size)
    is_prompt = t.causal_row < no_row
    begins = is_prompt & (t.positions % block_size == 0)
    tile = torch.cumsum(begins.to(torch.int32), dim=0, dtype=torch.int32) - 1
    of_token = torch.where(is_prompt, tile, tiles)
    every = torch.arange(tiles, dtype=torch.int32, device=device)
    inside = of_token[None] == every[:, None]
    count = inside.sum(dim=1, dtype=torch.int32)
    share = inside.to(torch.float32) / torch.clamp(count, min=1)[:, None]
    row = torch.where(inside, t.causal_row, -1).amax(dim=1)
    number = torch.where(inside, t.positions // block_size, -1).amax(dim=1)
    row = torch.where(row < 0, no_row, row)
    # Rows by blocks: the row index of padding reads nothing.
    reads_TS = gather(t.shared_reads, row) > 0
    is_same_TT = (row[:, None] == row[None]) & (row[:, None] < no_row)
    block = torch.cat([t.shared_start // block_size, number])
    may = torch.cat([reads_TS, is_same_TT], dim=1) & (block < number[:, None])
    row_of = torch.arange(no_row + 1, dtype=torch.int32, device=device)
    is_prompt_row = (t.causal_row == row_of[:, None]).any(dim=1) & (row_of < no_row)
    decode_reads = torch.where(is_prompt_row[:, None], 0, t.shared_reads)
    return TileStep(of_token, share, number, count == block_size, block, may, decode_reads)


def chosen_blocks(inputs: PartInputs, tiles: TileStep, choice: TopBlocks) -> Partial:
    """Tokens of prompt rows against their own tile and its chosen blocks.

    All blocks are read and the others masked: static shapes save nothing here. Results equal those of kernels
    that skip them.
    """
    q_QKGD, t, scoring = inputs.q, inputs.tensors, inputs.scoring
    estimates = estimate(_means(q_QKGD, tiles), _mean_keys(inputs, tiles), tiles.may, scoring)
    chosen_TKX = choice.chosen(estimates, tiles.may, tiles.number, tiles.block)
    seen_TKX = torch.where(tiles.is_whole[:, None, None], chosen_TKX, tiles.may[:, None])
    # One more tile, of tokens of no prompt row.
    seen_TKX = torch.cat([seen_TKX, torch.zeros_like(seen_TKX[:1])])
    num_shared = t.shared_block.shape[0]
    total = _new_keys(inputs, tiles, seen_TKX[..., num_shared:])
    if not num_shared:
        return total
    return merge(total, _context(inputs, tiles, seen_TKX[..., :num_shared]))


def estimate(
    q_TKGD: torch.Tensor, k_XKD: torch.Tensor, may_TX: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Estimate how much of a tile's attention each block before it receives, float32 ``[T, K, X]``.

    A softmax over the blocks before the tile for each query head, summed over the heads of a group.

    Args:
        q_TKGD, k_XKD: means of queries and of keys, float32; undefined where nothing is visible.
    """
    count, _, group, _ = q_TKGD.shape
    q_KTD = q_TKGD.transpose(0, 1).flatten(1, 2)
    scores = soften(torch.matmul(q_KTD, k_XKD.permute(1, 2, 0)), scoring).float()
    scores = torch.where(may_TX.repeat_interleave(group, dim=0), scores, FLOOR)
    weights = torch.softmax(scores, dim=-1)
    return weights.unflatten(1, (count, group)).sum(dim=2).transpose(0, 1)


def _means(x: torch.Tensor, tiles: TileStep) -> torch.Tensor:
    """Means of the new tokens of each tile, float32; 0 where there is none."""
    return torch.matmul(tiles.share, x.float().flatten(1)).unflatten(1, x.shape[1:])


def _mean_keys(inputs: PartInputs, tiles: TileStep) -> torch.Tensor:
    """Mean keys of the shared blocks and of the tiles, float32 ``[X, K, D]``."""
    units, scoring = inputs.units, inputs.scoring
    of_tiles = _means(inputs.new.k, tiles)
    key_bytes = units.key_bytes
    chunk = max(1, scoring.chunks.key_bytes // key_bytes)
    blocks = (units.key_tile(some) for some in inputs.tensors.shared_block.split(chunk) if len(some))
    return torch.cat([*(k_XKBD.mean(dim=2, dtype=torch.float32) for k_XKBD in blocks), of_tiles])


def _new_keys(inputs: PartInputs, tiles: TileStep, seen_TKT: torch.Tensor) -> Partial:
    """New keys of the same row, a slice of queries at a time."""
    q_QKGD, new, _, t, scoring, _, _ = inputs
    step, no_row, most = scoring.slices.queries, t.row_start.shape[0], len(tiles.number) - 1
    row, position, tile = t.causal_row, t.positions, tiles.of_token
    parts = []
    for begin in range(0, len(q_QKGD), step):
        end = min(begin + step, len(q_QKGD))
        causal_QT = causal_mask(row[begin:end], position[begin:end], row[:end], position[:end], no_row)
        is_own_QT = tile[begin:end, None] == tile[None, :end]
        of_tile_QKT = gather(seen_TKT, tile[begin:end])
        # Tokens of other rows are hidden keys.
        sees_QKT = of_tile_QKT.index_select(2, torch.clamp(tile[:end], max=most))
        visible_KQT = ((sees_QKT | is_own_QT[:, None]) & causal_QT[:, None]).transpose(0, 1)
        parts.append(attend_dense(q_QKGD[begin:end], new.k[:end], new.v[:end], visible_KQT, scoring))
    return parts[0] if len(parts) == 1 else Partial(*(torch.cat(list(x)) for x in zip(*parts)))


def _context(inputs: PartInputs, tiles: TileStep, seen_TKS: torch.Tensor) -> Partial:
    """Blocks filled before the step, a bounded chunk of them at a time."""
    q_QKGD, _, units, t, scoring, _, _ = inputs
    num_queries, num_kv, group, _ = q_QKGD.shape
    block_size, key_bytes = units.layout.num_slots, units.key_bytes
    chunk = scoring.chunks.shared(num_queries * num_kv * group, block_size, key_bytes)
    total = empty(q_QKGD, units.encoding.value_dim)
    for block, seen in zip(t.shared_block.split(chunk), seen_TKS.split(chunk, dim=2)):
        # Blocks that a prompt row sees are full; others are hidden here, and undefined.
        used_XB = leading_slots(seen.any(dim=0).any(dim=0).to(torch.int32) * block_size, block_size)
        k_TKD, v_TKD = as_keys(*units.tile(block), used_XB)
        visible_KQT = gather(seen, tiles.of_token).transpose(0, 1).repeat_interleave(block_size, dim=2)
        total = merge(total, attend_dense(q_QKGD, k_TKD, v_TKD, visible_KQT, scoring))
    return total
