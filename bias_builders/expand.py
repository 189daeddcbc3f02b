"""Device expansions: from compact int32 plans to boolean masks of static shape.

Masks are booleans and the kernels turn a hidden score into a finite floor, so no infinity and
no NaN can arise from them. Nothing larger than ``[queries of a slice, keys of a slice]`` or
``[Q, blocks of a chunk, B]`` exists at any time.
"""

from __future__ import annotations

import torch

from bias_builders.rules import Window, sees_causal, sees_streaming


def causal_mask(
    query_row: torch.Tensor,
    query_position: torch.Tensor,
    key_row: torch.Tensor,
    key_position: torch.Tensor,
    no_row: int,
    window: Window | None = None,
) -> torch.Tensor:
    """Which new keys each new query sees.

    Args:
        query_row, key_row: row of each token, int32 ``[q]`` and ``[k]``; ``no_row`` marks
            padding and rows with one new token, which take no part.
        query_position, key_position: int32 ``[q]`` and ``[k]``.
        window: None for retrieval heads, else the streaming rule.
    Returns:
        bool ``[q, k]``.
    """
    same_row = (query_row[:, None] == key_row[None, :]) & (query_row[:, None] < no_row)
    q, k = query_position[:, None], key_position[None, :]
    return same_row & (sees_causal(q, k) if window is None else sees_streaming(q, k, window))


def leading_slots(visible: torch.Tensor, num_slots: int) -> torch.Tensor:
    """``[..., num_slots]`` booleans, true for the first ``visible`` slots."""
    slot = torch.arange(num_slots, dtype=visible.dtype, device=visible.device)
    return slot < visible[..., None]


def ring_mask(
    query_row: torch.Tensor,
    query_position: torch.Tensor,
    ring_row: torch.Tensor,
    slot_positions: torch.Tensor,
    window: Window,
) -> torch.Tensor:
    """Which slots of the gathered rings each query of a multi-token row sees.

    Args:
        query_row, query_position: int32 ``[q]``.
        ring_row: row of each gathered ring, int32 ``[C]``.
        slot_positions: what the slots hold, -1 = empty, int32 ``[C, W]``.
    Returns:
        bool ``[q, C, W]``.
    """
    own = query_row[:, None, None] == ring_row[None, :, None]
    held = slot_positions[None] >= 0
    return own & held & sees_streaming(query_position[:, None, None], slot_positions[None], window)
