"""Prompts that see some blocks of keys, chosen on the device: the plan of a step, and the portable part.

Tiles of queries and blocks of keys are the same runs of positions, those of the engine's blocks. What a
block would receive of a tile is estimated by the mean query of the tile and the mean key of the block. The
new tokens of a prompt row begin at a border of blocks, and end at one unless the prompt ends. The queries of
a tile that is not whole, hence the last of its prompt, see all tokens. So what a query sees is a property of
the text, however it is cut into chunks.

Shapes: Q query tokens, N rows, T tiles of new tokens, X = S + T blocks of keys: S shared ones, then the new
ones; B slots of a block, K key/value heads, G query heads of each, D head size.

Source: estimation of block-sparse attention by pooled queries and keys, MInference (arXiv:2407.02490) and
FlexPrefill (arXiv:2502.20766).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bias_builders import TopBlocks, causal_mask, leading_slots
from kernels_ref.dense import as_keys, attend_dense
from kernels_ref.index import gather
from kernels_ref.partial import FLOOR, Partial, empty, merge
from kernels_ref.scoring import Scoring, soften
from kernels_ref.step import StepTensors
from kernels_ref.units import KVUnits, NewKV, gather_units


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
    # Rows by blocks: a row number of padding reads nothing.
    reads_TS = gather(t.shared_reads, row) > 0
    is_same_TT = (row[:, None] == row[None]) & (row[:, None] < no_row)
    block = torch.cat([t.shared_start // block_size, number])
    may = torch.cat([reads_TS, is_same_TT], dim=1) & (block < number[:, None])
    row_of = torch.arange(no_row + 1, dtype=torch.int32, device=device)
    is_prompt_row = (t.causal_row == row_of[:, None]).any(dim=1) & (row_of < no_row)
    decode_reads = torch.where(is_prompt_row[:, None], 0, t.shared_reads)
    return TileStep(of_token, share, number, count == block_size, block, may, decode_reads)


def chosen_blocks(
    q_QKGD: torch.Tensor,
    new: NewKV,
    units: KVUnits,
    t: StepTensors,
    tiles: TileStep,
    choice: TopBlocks,
    scoring: Scoring,
) -> Partial:
    """Tokens of prompt rows against their own tile and the blocks before it that are chosen for it.

    All blocks are read and the others masked: static shapes save nothing here. Results are those of kernels
    that skip them.
    """
    estimates = estimate(_means(q_QKGD, tiles), _mean_keys(new, units, t, tiles, scoring), tiles.may, scoring)
    chosen_TKX = choice.chosen(estimates, tiles.may, tiles.number, tiles.block)
    seen_TKX = torch.where(tiles.is_whole[:, None, None], chosen_TKX, tiles.may[:, None])
    # One more tile, of tokens of no prompt row.
    seen_TKX = torch.cat([seen_TKX, torch.zeros_like(seen_TKX[:1])])
    num_shared = t.shared_block.shape[0]
    total = _new_keys(q_QKGD, new, t, tiles, seen_TKX[..., num_shared:], scoring)
    if not num_shared:
        return total
    return merge(total, _context(q_QKGD, units, t, tiles, seen_TKX[..., :num_shared], scoring))


def estimate(
    q_TKGD: torch.Tensor, k_XKD: torch.Tensor, may_TX: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Estimate how much of a tile's attention each block before it receives, float32 ``[T, K, X]``.

    A softmax over the blocks before the tile for each query head, summed over the heads of a group.

    Args:
        q_TKGD, k_XKD: means of queries and of keys, float32; anything where nothing may be seen.
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


def _mean_keys(new: NewKV, units: KVUnits, t: StepTensors, tiles: TileStep, scoring: Scoring) -> torch.Tensor:
    """Mean keys of the shared blocks and of the tiles, float32 ``[X, K, D]``."""
    of_tiles = _means(new.k, tiles)
    key_bytes = units.k[0].numel() * units.k.element_size()
    chunk = max(1, scoring.chunks.key_bytes // key_bytes)
    blocks = (gather(units.k, some) for some in t.shared_block.split(chunk) if len(some))
    return torch.cat([*(k_XKBD.mean(dim=2, dtype=torch.float32) for k_XKBD in blocks), of_tiles])


def _new_keys(
    q_QKGD: torch.Tensor,
    new: NewKV,
    t: StepTensors,
    tiles: TileStep,
    seen_TKT: torch.Tensor,
    scoring: Scoring,
) -> Partial:
    """New keys of the same row, a slice of queries at a time."""
    step, no_row, most = scoring.slices.queries, t.row_start.shape[0], len(tiles.number) - 1
    row, position, tile = t.causal_row, t.positions, tiles.of_token
    parts = []
    for begin in range(0, len(q_QKGD), step):
        end = min(begin + step, len(q_QKGD))
        causal_QT = causal_mask(row[begin:end], position[begin:end], row[:end], position[:end], no_row)
        is_own_QT = tile[begin:end, None] == tile[None, :end]
        of_tile_QKT = gather(seen_TKT, tile[begin:end])
        # Tokens of no prompt row are keys that nobody sees.
        sees_QKT = of_tile_QKT.index_select(2, torch.clamp(tile[:end], max=most))
        visible_KQT = ((sees_QKT | is_own_QT[:, None]) & causal_QT[:, None]).transpose(0, 1)
        parts.append(attend_dense(q_QKGD[begin:end], new.k[:end], new.v[:end], visible_KQT, scoring))
    return parts[0] if len(parts) == 1 else Partial(*(torch.cat(list(x)) for x in zip(*parts)))


def _context(
    q_QKGD: torch.Tensor,
    units: KVUnits,
    t: StepTensors,
    tiles: TileStep,
    seen_TKS: torch.Tensor,
    scoring: Scoring,
) -> Partial:
    """Blocks that were there before the step, a bounded chunk of them at a time."""
    num_queries, num_kv, group, _ = q_QKGD.shape
    block_size, key_bytes = units.layout.num_slots, units.k[0].numel() * units.k.element_size()
    chunk = scoring.chunks.shared(num_queries * num_kv * group, block_size, key_bytes)
    total = empty(q_QKGD)
    for block, seen in zip(t.shared_block.split(chunk), seen_TKS.split(chunk, dim=2)):
        # Blocks that a prompt row sees are full; others, which nobody sees here, may hold anything.
        used_XB = leading_slots(seen.any(dim=0).any(dim=0).to(torch.int32) * block_size, block_size)
        k_TKD, v_TKD = as_keys(*gather_units(units, block), used_XB)
        visible_KQT = gather(seen, tiles.of_token).transpose(0, 1).repeat_interleave(block_size, dim=2)
        total = merge(total, attend_dense(q_QKGD, k_TKD, v_TKD, visible_KQT, scoring))
    return total
