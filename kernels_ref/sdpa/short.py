"""One row over few slots, as sums of products that a compiler fuses into its loops.

For so little work the call of a batched product costs more than the product. Scores stay in float32
throughout. Only for compiled steps: eager, these sums would be slow.
"""

from __future__ import annotations

import torch

from bias_builders import Leading, leading_slots
from kernels_ref.partial import FLOOR, Partial, Scoring, merge, soften
from kernels_ref.step import BlockStep, PartInputs
from kernels_ref.units import gather_units

MAX_SLOTS = 1024
"""Most slots for which this is faster."""


def fits(q_NKHD: torch.Tensor, seen: Leading, num_slots: int) -> bool:
    """Whether a step is compiled, has one row of one token, and reads few slots."""
    is_one = q_NKHD.shape[0] == 1 == seen.visible.shape[2]
    return is_one and num_slots <= MAX_SLOTS and torch.compiler.is_compiling()


def unique_blocks(inputs: PartInputs, blocks: BlockStep) -> Partial:
    """The row's whole blocks of the contiguous slice, and its tail."""
    q_1KHD, _, units, t, scoring, _, _ = inputs
    block_size, num_blocks = units.layout.num_slots, t.owner.shape[0]
    tail_k, tail_v = gather_units(units, t.tail_block.view(-1))
    visible = leading_slots(blocks.tails.visible.view(-1), block_size)
    tail = attend_units(q_1KHD, tail_k, tail_v, visible, scoring)
    if not num_blocks:
        return tail
    owned_XB = (t.owner == 0)[:, None].expand(num_blocks, block_size)
    whole = attend_units(q_1KHD, units.k[:num_blocks], units.v[:num_blocks], owned_XB, scoring)
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
