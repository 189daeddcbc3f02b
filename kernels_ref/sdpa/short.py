"""One row over few slots, as sums of products that a compiler fuses into its loops.

For so little work the start of a batched product costs more than the product. Scores stay in
float32 throughout. Only for compiled steps: run as they stand, these sums would be slow.
"""

from __future__ import annotations

import torch

from bias_builders import leading_slots
from kernels_ref.index import gather
from kernels_ref.partial import FLOOR, Partial, merge
from kernels_ref.reference import soften
from kernels_ref.step import StepTensors

MAX_SLOTS = 1024
"""Slots up to which this pays."""


def fits(q_NKGD: torch.Tensor, num_slots: int) -> bool:
    """Whether a step is compiled, has one row, and reads few slots."""
    return q_NKGD.shape[0] == 1 and num_slots <= MAX_SLOTS and torch.compiler.is_compiling()


def unique_blocks(
    q_1KGD: torch.Tensor, k_XKBD: torch.Tensor, v_XKBD: torch.Tensor, t: StepTensors, softcap: float | None
) -> Partial:
    """The row's whole blocks of the contiguous slice, and its tail."""
    block_size, num_blocks = k_XKBD.shape[2], t.owner.shape[0]
    tail_k, tail_v = gather(k_XKBD, t.tail_block), gather(v_XKBD, t.tail_block)
    tail = attend_units(q_1KGD, tail_k, tail_v, leading_slots(t.tail_visible, block_size), softcap)
    if not num_blocks:
        return tail
    owned_XB = (t.owner == 0)[:, None].expand(num_blocks, block_size)
    return merge(tail, attend_units(q_1KGD, k_XKBD[:num_blocks], v_XKBD[:num_blocks], owned_XB, softcap))


def attend_units(
    q_1KGD: torch.Tensor,
    k_XKSD: torch.Tensor,
    v_XKSD: torch.Tensor,
    visible_XS: torch.Tensor,
    softcap: float | None,
) -> Partial:
    """One query over the visible slots of X units; what the others hold does not matter."""
    q_KGD = q_1KGD[0].float()
    products = q_KGD[None, :, :, None, :] * k_XKSD[:, :, None].float()
    visible = visible_XS[:, None, None, :]
    scores_XKGS = torch.where(visible, soften(products.sum(dim=-1), softcap), FLOOR)
    largest_KG = scores_XKGS.amax(dim=(0, 3))
    weights = torch.where(visible, torch.exp(scores_XKGS - largest_KG[..., None]), 0.0)
    values = torch.where(visible[..., None], v_XKSD[:, :, None].float(), 0.0)
    attn_KGD = (weights[..., None] * values).sum(dim=(0, 3))
    return Partial(attn_KGD[None], largest_KG[None], weights.sum(dim=(0, 3))[None])
