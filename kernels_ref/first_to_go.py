"""The slot of a full store that is given up: the portable part for heads with a budget.

Shapes: N rows, K key/value heads, C slots.
"""

from __future__ import annotations

import torch

from kernels_ref.partial import FLOOR

_BEYOND = 1 << 30
"""Above any position."""


def first_to_go(
    score_NKC: torch.Tensor | None, position_NKC: torch.Tensor, is_protected: torch.Tensor | None
) -> torch.Tensor:
    """Find the unprotected slot with the lowest score, of equal ones that with the lowest position.

    Args:
        score_NKC: float32, finite and of magnitudes below 1e30; None = all are equal.
        position_NKC: int32, 0 or more and below 2^30.
        is_protected: bool, broadcast against the positions; None = any slot may go. Fewer than C of a row
            and head.

    Returns:
        int32 ``[N, K]``.
    """
    passed_over = is_protected
    if score_NKC is not None:
        rank = ranks(score_NKC, is_protected)
        passed_over = rank != rank.amin(dim=-1, keepdim=True)
    position = position_NKC
    if passed_over is not None:
        position = torch.add(position, passed_over, alpha=_BEYOND)
    return position.argmin(dim=-1).to(torch.int32)


def ranks(score: torch.Tensor, is_protected: torch.Tensor | None) -> torch.Tensor:
    """Scores, those of protected slots above all others."""
    # Sums, where a choice would do: on a CPU they take a twentieth of its time.
    return score if is_protected is None else torch.add(score, is_protected, alpha=-FLOOR)
