"""The parts of unified attention by Triton kernels; see ``kernels_ref.reference`` for what each computes.

Shapes: as in ``kernels_ref.reference``. Bad shapes, types, devices and layouts raise ``ValueError``.
"""

from __future__ import annotations

import torch

from kernels_ref.partial import Partial
from kernels_ref.step import StepTensors
from kernels_ref.triton import operators


def unique_blocks(
    q_NKGD: torch.Tensor, k_XKBD: torch.Tensor, v_XKBD: torch.Tensor, t: StepTensors, softcap: float | None
) -> Partial:
    """Single-token rows against the blocks that only they read."""
    plan = (t.owner, t.tail_block, t.tail_visible)
    return Partial(*operators.unique_blocks(q_NKGD, k_XKBD, v_XKBD, *plan, softcap or 0.0))
