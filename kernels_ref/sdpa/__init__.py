"""The parts on CPU: torch's fused flash attention for prompts, batched products for decodes.

On CPU the host is the device, so these kernels may look at the plan: each multi-token row attends
over exactly its own keys, mostly without any mask, and pays nothing for padding or for other
rows; decodes read exactly the blocks they own. That work is hidden behind operators of static
output shape, so captured steps stay static, and a compiled layer holds nothing that depends on
how much context there is.

Shapes: as in ``kernels_ref.reference``.
"""

from __future__ import annotations

import torch

from bias_builders import Window, leading_slots
from kernels_ref import reference
from kernels_ref.partial import Partial, finish
from kernels_ref.sdpa import decode, prefill, short
from kernels_ref.sdpa.operators import register
from kernels_ref.sdpa.store import write_kv
from kernels_ref.step import RingStep, StepTensors
from kernels_ref.x86 import rows

__all__ = ["causal", "finish", "shared_blocks", "shared_rings", "unique_blocks", "unique_rings", "write_kv"]

SHORT_SLICE = 8
"""Blocks up to which the unique part is the reference's."""

_ROWS = "Tensor row_start, Tensor row_num_new, Tensor row_query_start"
_QKV = "Tensor q, Tensor k, Tensor v"
_causal = register("causal", f"{_QKV}, {_ROWS}, int sink, int recent", prefill.causal)
_shared_blocks = register(
    "shared_blocks", f"{_QKV}, {_ROWS}, Tensor shared_block, Tensor shared_visible", prefill.shared_blocks
)
_shared_rings = register(
    "shared_rings",
    f"{_QKV}, {_ROWS}, Tensor chunk_row, Tensor chunk_position, int sink, int recent",
    prefill.shared_rings,
)
_unique_blocks = register(
    "unique_blocks",
    f"{_QKV}, Tensor owner, Tensor tail_block, Tensor tail_visible, float softcap",
    decode.unique_blocks,
)
_unique_rings = register("unique_rings", f"{_QKV}, Tensor visible, float softcap", decode.unique_rings)


def causal(
    q_QKGD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    t: StepTensors,
    window: Window | None,
    softcap: float | None,
) -> Partial:
    """New tokens of multi-token rows against the new keys of their own row."""
    _refuse(softcap)
    return Partial(*_causal(q_QKGD, k_QKD, v_QKD, *_row_plan(t), *(window or (0, 0))))


def shared_blocks(
    q_QKGD: torch.Tensor, k_XKBD: torch.Tensor, v_XKBD: torch.Tensor, t: StepTensors, softcap: float | None
) -> Partial:
    """Every row against the shared blocks that it sees."""
    _refuse(softcap)
    return Partial(*_shared_blocks(q_QKGD, k_XKBD, v_XKBD, *_row_plan(t), t.shared_block, t.shared_visible))


def shared_rings(
    q_QKGD: torch.Tensor,
    k_RKWD: torch.Tensor,
    v_RKWD: torch.Tensor,
    t: StepTensors,
    ring: RingStep,
    window: Window,
    softcap: float | None,
) -> Partial:
    """Tokens of multi-token rows against what their ring held before the step."""
    _refuse(softcap)
    return Partial(
        *_shared_rings(q_QKGD, k_RKWD, v_RKWD, *_row_plan(t), t.chunk_row, ring.chunk_position, *window)
    )


def unique_blocks(
    q_NKGD: torch.Tensor, k_XKBD: torch.Tensor, v_XKBD: torch.Tensor, t: StepTensors, softcap: float | None
) -> Partial:
    """Single-token rows against the blocks that only they read.

    Without a kernel of our own, a short slice costs less as plain tensor code, which a compiler fuses,
    than as an operator.
    """
    plan = (t.owner, t.tail_block, t.tail_visible)
    if softcap is None and rows.fits(q_NKGD, k_XKBD):
        return rows.attend_blocks(q_NKGD, k_XKBD, v_XKBD, *plan)
    if short.fits(q_NKGD, (t.owner.shape[0] + 1) * k_XKBD.shape[2]):
        return short.unique_blocks(q_NKGD, k_XKBD, v_XKBD, t, softcap)
    if t.owner.shape[0] <= SHORT_SLICE:
        return reference.unique_blocks(q_NKGD, k_XKBD, v_XKBD, t, softcap)
    return Partial(*_unique_blocks(q_NKGD, k_XKBD, v_XKBD, *plan, softcap or 0.0))


def unique_rings(
    q_NKGD: torch.Tensor, k_RKWD: torch.Tensor, v_RKWD: torch.Tensor, ring: RingStep, softcap: float | None
) -> Partial:
    """Single-token rows against their rings."""
    if softcap is None and rows.fits(q_NKGD, k_RKWD):
        return rows.attend_rings(q_NKGD, k_RKWD, v_RKWD, ring.visible)
    if short.fits(q_NKGD, k_RKWD.shape[2]):
        visible = leading_slots(ring.visible, k_RKWD.shape[2])
        return short.attend_units(q_NKGD, k_RKWD[:1], v_RKWD[:1], visible, softcap)
    return Partial(*_unique_rings(q_NKGD, k_RKWD, v_RKWD, ring.visible, softcap or 0.0))


def _row_plan(t: StepTensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return t.row_start, t.row_num_new, t.row_query_start


def _refuse(softcap: float | None) -> None:
    if softcap is not None:
        raise ValueError(f"torch's fused attention has no soft cap, got softcap={softcap}")
