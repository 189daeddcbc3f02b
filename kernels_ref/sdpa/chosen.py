"""Prompts that see some blocks: only the chosen blocks are read.

The function here runs inside an operator: it reads the plan, loops over rows and tiles, and returns the
partial of all queries, empty where a query takes no part. New keys are read from their blocks, where they
have been written.

Shapes: as in ``kernels_ref.chosen``; B is also the tokens of a tile.
"""

from __future__ import annotations

import torch

from bias_builders import TopBlocks
from kernels_ref.chosen import estimate
from kernels_ref.partial import Partial, empty, merge
from kernels_ref.scoring import Scoring
from kernels_ref.sdpa.flash import flash
from kernels_ref.sdpa.prefill import prompt_rows
from kernels_ref.x86 import attention as tiled


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
    total, choice = empty(q_QKGD), TopBlocks(num_blocks)
    block_size = k_XKBD.shape[2]
    for row in prompt_rows(row_start, row_num_new, row_query_start, causal_row):
        assert row.start % block_size == 0, f"a chunk begins inside a block, at {row.start}"
        reads = (shared_reads[row.number] > 0) & (shared_start < row.start)
        before = shared_block[reads][torch.argsort(shared_start[reads])]
        # In the order of the text, so that a block's number is its place.
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
    """Merge what a tile sees of blocks before it: as many in each head, ``context_blocks`` at a time."""
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
    if tiled.fits(q_SKGD, k_TKD):
        tiled.attend(seen, q_SKGD, k_TKD, v_TKD, is_causal=is_causal)
        return
    for whole, merged in zip(seen, merge(seen, flash(q_SKGD, k_TKD, v_TKD, is_causal=is_causal))):
        whole.copy_(merged)
