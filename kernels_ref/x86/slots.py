"""The eviction victims of a budget, in one pass.

Shapes: N rows, K heads, C slots.
"""

from __future__ import annotations

import torch

from kernels_ref.x86.library import is_available, require


def fits(position_NKC: torch.Tensor) -> bool:
    """Whether the kernel can read the slots; a constant for compiled code."""
    return position_NKC.device.type == "cpu" and is_available()


def eviction_victims(
    score_NKC: torch.Tensor | None, position_NKC: torch.Tensor, is_protected: torch.Tensor | None
) -> torch.Tensor:
    """See ``kernels_ref.groups.budget_slots``.

    Raises:
        ValueError: shapes that differ, other dtypes, or no such kernel here.
    """
    require()
    return torch.ops.hpu_duo_x86.eviction_victims.default(score_NKC, position_NKC, is_protected)
