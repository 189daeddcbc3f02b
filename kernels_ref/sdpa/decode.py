"""Decode rows: bound by reading keys and values, so hidden slots are not read.

Most functions run inside operators: they read the plan and return partials of all rows. For one row over few
slots, where the start of a batched product costs more than the product, ``short_blocks`` and ``attend_units``
are sums of products that a compiler fuses into its loops.
Shapes: as in ``kernels_ref.reference``; ``softcap`` 0 means none.
"""

from __future__ import annotations

import torch

from bias_builders import Held, Leading, leading_slots, seen_mask
from kernels_ref.groups.budget_slots import weighed
from kernels_ref.partial import FLOOR, Partial, Scoring, attend, empty, merge, soften
from kernels_ref.reference import merge_by_owner, own_units, side_by_side
from kernels_ref.step import BlockStep, PartInputs


def unique_blocks(
    q_NKHD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    owner: torch.Tensor,
    tail_block: torch.Tensor,
    tail_visible: torch.Tensor,
    softcap: float,
    decode_slots: int,
) -> Partial:
    """Whole blocks from the contiguous slice, ``decode_slots`` at a time, then the tails of all rows."""
    num_rows = q_NKHD.shape[0]
    total = _tails(q_NKHD, k_XKBD, v_XKBD, tail_block, tail_visible, softcap)
    owned = (owner < num_rows).nonzero().flatten()
    if not len(owned):
        return total
    # Blocks before the first and after the last owned one are not read.
    first, last = int(owned[0]), int(owned[-1]) + 1
    chunk = max(1, decode_slots // k_XKBD.shape[2])
    for begin in range(first, last, chunk):
        end = min(begin + chunk, last)
        k, v = k_XKBD[begin:end], v_XKBD[begin:end]
        if num_rows == 1 and len(owned) == last - first:
            total = merge(total, _one_row(q_NKHD, k, v, softcap))
        else:
            query = q_NKHD.index_select(0, owner[begin:end].clamp(max=num_rows - 1))
            total = merge_by_owner(total, _scores(query, k, softcap), v, owner[begin:end])
    return total


def leading_rings(
    q_NKHD: torch.Tensor, k_RKWD: torch.Tensor, v_RKWD: torch.Tensor, visible: torch.Tensor, softcap: float
) -> Partial:
    """Row ``n`` against the leading slots of ring ``n``, ``visible [N, 1, 1]`` of them."""
    num_rows = q_NKHD.shape[0]
    used = int(visible.max())
    if used == 0:
        return empty(q_NKHD, v_RKWD.shape[-1])
    k, v = k_RKWD[:num_rows, :, :used], v_RKWD[:num_rows, :, :used]
    if bool((visible == used).all()):
        return attend(_scores(q_NKHD, k, softcap), None, v)
    return own_units(q_NKHD, k, v, seen_mask(Leading(visible), used), Scoring(softcap or None))


def rings_with_weights(
    q_NKGD: torch.Tensor,
    k_RKWD: torch.Tensor,
    v_RKWD: torch.Tensor,
    visible: torch.Tensor,
    sinks_KG: torch.Tensor | None,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same, with the weight of each slot of the rings, ``[N, K, W]``."""
    num_rows, num_slots = len(q_NKGD), k_RKWD.shape[2]
    used = int(visible.max())
    mass = torch.zeros(num_rows, k_RKWD.shape[1], num_slots)
    if used == 0:
        return *empty(q_NKGD, v_RKWD.shape[-1]), mass
    k, v = k_RKWD[:num_rows, :, :used], v_RKWD[:num_rows, :, :used]
    valid = None if bool((visible == used).all()) else seen_mask(Leading(visible), used)[:, :, 0]
    partial, mass[..., :used] = weighed(q_NKGD, k, v, valid, Scoring(softcap or None), sinks_KG)
    return *partial, mass


def held_rings(
    q_NKHD: torch.Tensor,
    k_RKWD: torch.Tensor,
    v_RKWD: torch.Tensor,
    position: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    sink: int,
    softcap: float,
) -> Partial:
    """The tokens of row ``n`` against the positions that each sees of ring ``n``; see ``Held``."""
    num_rows, num_slots = q_NKHD.shape[0], k_RKWD.shape[2]
    visible = seen_mask(Held(position, begin, end, sink), num_slots)
    return own_units(q_NKHD, k_RKWD[:num_rows], v_RKWD[:num_rows], visible, Scoring(softcap or None))


def _scores(q: torch.Tensor, k: torch.Tensor, softcap: float) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)).float()
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _tails(
    q_NKHD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    tail_block: torch.Tensor,
    tail_visible: torch.Tensor,
    softcap: float,
) -> Partial:
    """Blocks that not every token sees whole: only as many slots as the most that any token sees of one."""
    used = int(tail_visible.max())
    if used == 0:
        return empty(q_NKHD, v_XKBD.shape[-1])
    if tail_visible.numel() == 1:
        block = int(tail_block)
        k, v = k_XKBD[block, None, :, :used], v_XKBD[block, None, :, :used]
        return attend(_scores(q_NKHD, k, softcap), None, v)
    num_tails = tail_block.shape[1]
    k, v = (
        side_by_side(x[:, :, :used].index_select(0, tail_block.view(-1)), num_tails) for x in (k_XKBD, v_XKBD)
    )
    return own_units(q_NKHD, k, v, seen_mask(Leading(tail_visible), used), Scoring(softcap or None))


MANY_HEADS = 16
"""Query heads of one key/value head from which two matrices are multiplied, not a batch over blocks."""


def _one_row(q_1KHD: torch.Tensor, k_XKBD: torch.Tensor, v_XKBD: torch.Tensor, softcap: float) -> Partial:
    """Attention of a single row, which needs no sums by owner."""
    if k_XKBD.shape[1] == 1 and q_1KHD.shape[2] >= MANY_HEADS:
        # All heads read the same keys: products of two matrices, since blocks lie side by side.
        return _one_head(q_1KHD[0, 0], k_XKBD.flatten(0, 2), v_XKBD.flatten(0, 2), softcap)
    scores_XKHB = _scores(q_1KHD, k_XKBD, softcap)
    largest_KH = scores_XKHB.amax(dim=(0, 3))
    weights = scores_XKHB.sub_(largest_KH[..., None]).exp_()
    attn = torch.matmul(weights.to(v_XKBD.dtype), v_XKBD).sum(dim=0, dtype=torch.float32)
    return Partial(attn[None], largest_KH[None], weights.sum(dim=(0, 3))[None])


def _one_head(q_HD: torch.Tensor, k_TD: torch.Tensor, v_TD: torch.Tensor, softcap: float) -> Partial:
    """Attention of a single row over one key/value head."""
    scores_HT = _scores(q_HD, k_TD, softcap)
    largest_H = scores_HT.amax(dim=1)
    weights = scores_HT.sub_(largest_H[:, None]).exp_()
    attn_HD = torch.matmul(weights.to(v_TD.dtype), v_TD).float()
    return Partial(attn_HD[None, None], largest_H[None, None], weights.sum(dim=1)[None, None])


MAX_SHORT_SLOTS = 1024
"""Most slots for which this is faster."""


def is_short(q_NKHD: torch.Tensor, seen: Leading, num_slots: int) -> bool:
    """Whether a step is compiled, has one row of one token, and reads few slots."""
    is_one = q_NKHD.shape[0] == 1 == seen.visible.shape[2]
    return is_one and num_slots <= MAX_SHORT_SLOTS and torch.compiler.is_compiling()


def short_blocks(inputs: PartInputs, blocks: BlockStep) -> Partial:
    """The row's whole blocks of the contiguous slice, and its tail."""
    q_1KHD, _, units, t, scoring, _, _ = inputs
    block_size, num_blocks = units.layout.num_slots, t.owner.shape[0]
    tail_k, tail_v = units.tile(t.tail_block.view(-1))
    visible = leading_slots(blocks.tails.visible.view(-1), block_size)
    tail = attend_units(q_1KHD, tail_k, tail_v, visible, scoring)
    if not num_blocks:
        return tail
    owned_XB = (t.owner == 0)[:, None].expand(num_blocks, block_size)
    whole = attend_units(q_1KHD, *units.tile(slice(0, num_blocks)), owned_XB, scoring)
    return merge(tail, whole)


def attend_units(
    q_1KHD: torch.Tensor,
    k_XKSD: torch.Tensor,
    v_XKSD: torch.Tensor,
    visible_XS: torch.Tensor,
    scoring: Scoring,
) -> Partial:
    """One query over the visible slots of X units; hidden slots are undefined."""
    q_KHD = q_1KHD[0].float()
    products = q_KHD[None, :, :, None, :] * k_XKSD[:, :, None].float()
    visible = visible_XS[:, None, None, :]
    scores_XKHS = torch.where(visible, soften(products.sum(dim=-1), scoring), FLOOR)
    largest_KH = scores_XKHS.amax(dim=(0, 3))
    weights = torch.where(visible, torch.exp(scores_XKHS - largest_KH[..., None]), 0.0)
    values = torch.where(visible[..., None], v_XKSD[:, :, None].float(), 0.0)
    attn_KHD = (weights[..., None] * values).sum(dim=(0, 3))
    return Partial(attn_KHD[None], largest_KH[None], weights.sum(dim=(0, 3))[None])
