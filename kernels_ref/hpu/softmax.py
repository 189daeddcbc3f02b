"""Weights, maxima and sums of scores by one operator each.

Shapes: as in ``kernels_ref.reference``.
"""

from __future__ import annotations

import torch

from kernels_ref.index import gather
from kernels_ref.partial import FLOOR, SEEN, Partial, widened

_PACKED = 8
"""Numbers in a cache line of maxima or sums."""

_NOBODY = -1
"""Indicator of a block whose softmax is left out: a mark, and no index."""


def attend(
    scores: torch.Tensor, visible: torch.Tensor | None, values: torch.Tensor, line_bytes: int
) -> Partial:
    """The triple of scaled scores; see ``kernels_ref.partial.attend``.

    Args:
        line_bytes: see ``FusedOperators``.
    """
    if visible is not None:
        scores = torch.where(visible, scores, FLOOR)
    rows = scores.shape[:-1]
    numbers_of_line = line_bytes // scores.element_size()
    lines = -(-rows[-1] // _PACKED)
    stats = (*rows[:-1], lines * numbers_of_line) if line_bytes else rows
    weights, largest, total, _ = torch.ops.hpu.softmax_fa2(
        scores, inputM=scores.new_full(stats, FLOOR), inputL=scores.new_zeros(stats)
    )
    if line_bytes:
        largest, total = (
            x.unflatten(-1, (lines, numbers_of_line))[..., :_PACKED].flatten(-2)[..., : rows[-1]]
            for x in (largest, total)
        )
    largest, total = widened(largest), widened(total)
    attn = torch.matmul(weights.to(values.dtype), values).float()
    if visible is not None:
        sees_any = largest > SEEN
        total = torch.where(sees_any, total, 0.0)
        attn = torch.where(sees_any[..., None], attn, 0.0)
    return Partial(attn, largest, total)


def merge_by_owner(
    total: Partial, scores_XKHB: torch.Tensor, v_XKBD: torch.Tensor, owner: torch.Tensor
) -> Partial:
    """Add whole blocks to what their owners have seen; see ``kernels_ref.by_owner.merge_by_owner``.

    Each block's weights are relative to its own largest score. ``block_softmax_adjustment`` does not fit
    here: it divides by the sum of all blocks of a row, which have to be merged with other parts.
    """
    num_rows, num_kv, heads, dim = total.attn.shape
    num_blocks, block_size = scores_XKHB.shape[0], scores_XKHB.shape[-1]
    owned = owner < num_rows
    bias = scores_XKHB.new_zeros(num_blocks, 1, 1, 1, block_size)
    weights, block_max, block_sum = torch.ops.hpu.block_softmax(
        scores_XKHB.unsqueeze(3), bias, torch.where(owned, owner, _NOBODY)
    )
    # A Gaudi 3 pads maxima and sums to whole vectors; those of left out blocks may be anything.
    block_max, block_sum = (
        widened(x[:, : num_kv * heads]).view(num_blocks, num_kv, heads) for x in (block_max, block_sum)
    )
    attn = torch.matmul(weights[:, :, :, 0].to(v_XKBD.dtype), v_XKBD).float()
    row = torch.arange(num_rows, dtype=owner.dtype, device=owner.device)
    member_NX = row[:, None] == owner[None]
    largest = torch.where(member_NX[..., None, None], block_max[None], FLOOR).amax(dim=1)
    row_max = torch.maximum(total.max, largest)
    own_max = gather(row_max, torch.clamp(owner, max=num_rows - 1))
    scale = torch.exp(block_max - own_max)
    # Selecting, not multiplying, keeps a NaN of somebody else's block out of the product.
    owned_XKH = owned[:, None, None]
    attn = torch.where(owned_XKH[..., None], attn * scale[..., None], 0.0)
    sums = torch.where(owned_XKH, block_sum * scale, 0.0)
    member = member_NX.to(attn.dtype)
    decay = torch.exp(total.max - row_max)
    return Partial(
        torch.addcmul(
            torch.matmul(member, attn.view(num_blocks, -1)).view(num_rows, num_kv, heads, dim),
            total.attn,
            decay[..., None],
        ),
        row_max,
        torch.addcmul(
            torch.matmul(member, sums.view(num_blocks, -1)).view(num_rows, num_kv, heads), total.sum, decay
        ),
    )
