"""Rows with one new token: bound by reading keys and values, so nothing is read that nobody sees.

The functions here run inside operators: they read the plan and return partials of all rows.
Shapes: as in ``kernels_ref.reference``; ``softcap`` 0 means none.
"""

from __future__ import annotations

import torch

from bias_builders import leading_slots
from kernels_ref.partial import Partial, attend, empty, merge
from kernels_ref.reference import merge_by_owner

CHUNK_SLOTS = 8192
"""Slots of the blocks that are read at a time: their scores stay in the second-level cache, and a single
request of that many tokens fills a chunk, so that a longer one takes no more."""


def unique_blocks(
    q_NKGD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    owner: torch.Tensor,
    tail_block: torch.Tensor,
    tail_visible: torch.Tensor,
    softcap: float,
) -> Partial:
    """Whole blocks from the contiguous slice, then the tails of all rows."""
    num_rows = q_NKGD.shape[0]
    total = _tails(q_NKGD, k_XKBD, v_XKBD, tail_block, tail_visible, softcap)
    owned = (owner < num_rows).nonzero().flatten()
    if not len(owned):
        return total
    # Blocks before the first and after the last owned one are not read at all.
    first, last = int(owned[0]), int(owned[-1]) + 1
    chunk = max(1, CHUNK_SLOTS // k_XKBD.shape[2])
    for begin in range(first, last, chunk):
        end = min(begin + chunk, last)
        k, v = k_XKBD[begin:end], v_XKBD[begin:end]
        if num_rows == 1 and len(owned) == last - first:
            total = merge(total, _one_row(q_NKGD, k, v, softcap))
        else:
            query = q_NKGD.index_select(0, owner[begin:end].clamp(max=num_rows - 1))
            total = merge_by_owner(total, _scores(query, k, softcap), v, owner[begin:end])
    return total


def unique_rings(
    q_NKGD: torch.Tensor,
    k_RKWD: torch.Tensor,
    v_RKWD: torch.Tensor,
    visible: torch.Tensor,
    softcap: float,
) -> Partial:
    """Row ``n`` against ring ``n``."""
    num_rows = q_NKGD.shape[0]
    used = int(visible.max())
    if used == 0:
        return empty(q_NKGD)
    k, v = k_RKWD[:num_rows, :, :used], v_RKWD[:num_rows, :, :used]
    if bool((visible == used).all()):
        return attend(_scores(q_NKGD, k, softcap), None, v)
    return _masked(q_NKGD, k, v, visible, softcap)


def _scores(q: torch.Tensor, k: torch.Tensor, softcap: float) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)).float()
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _masked(
    q_NKGD: torch.Tensor, k_NKSD: torch.Tensor, v_NKSD: torch.Tensor, visible: torch.Tensor, softcap: float
) -> Partial:
    seen_NS = leading_slots(visible, k_NKSD.shape[2])
    values = torch.where(seen_NS[:, None, :, None], v_NKSD, 0)
    return attend(_scores(q_NKGD, k_NKSD, softcap), seen_NS[:, None, None, :], values)


def _tails(
    q_NKGD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    tail_block: torch.Tensor,
    tail_visible: torch.Tensor,
    softcap: float,
) -> Partial:
    """Partly filled blocks: only as many slots as the fullest of them shows."""
    used = int(tail_visible.max())
    if used == 0:
        return empty(q_NKGD)
    if len(tail_block) == 1:
        block = int(tail_block)
        k, v = k_XKBD[block, None, :, :used], v_XKBD[block, None, :, :used]
        return attend(_scores(q_NKGD, k, softcap), None, v)
    k, v = (x[:, :, :used].index_select(0, tail_block) for x in (k_XKBD, v_XKBD))
    return _masked(q_NKGD, k, v, tail_visible, softcap)


def _one_row(q_1KGD: torch.Tensor, k_XKBD: torch.Tensor, v_XKBD: torch.Tensor, softcap: float) -> Partial:
    """All blocks belong to one row, so their softmax needs no owner."""
    scores_XKGB = _scores(q_1KGD, k_XKBD, softcap)
    largest_KG = scores_XKGB.amax(dim=(0, 3))
    weights = scores_XKGB.sub_(largest_KG[..., None]).exp_()
    attn = torch.matmul(weights.to(v_XKBD.dtype), v_XKBD).sum(dim=0, dtype=torch.float32)
    return Partial(attn[None], largest_KG[None], weights.sum(dim=(0, 3))[None])
