"""Sums of attention weights by slot and new key of prompt rows, row by row on the host.

Shapes: Q query tokens, P prompt rows, T new tokens of a row, C slots, K key/value heads, G query heads of
each, D head size.
"""

from __future__ import annotations

import torch

from kernels_ref.x86 import sums


def column_sums(
    q_QKGD: torch.Tensor,
    lse_QKG: torch.Tensor,
    k_QKD: torch.Tensor,
    slots_PKCD: torch.Tensor | None,
    start: torch.Tensor,
    num_new: torch.Tensor,
    token: torch.Tensor,
    num_observed: int | None,
) -> torch.Tensor:
    """See ``kernels_ref.groups.column_sums``; the last arguments are those of its ``ChunkStep``."""
    num_slots = 0 if slots_PKCD is None else slots_PKCD.shape[2]
    num_rows, most_new = token.shape
    total = q_QKGD.new_zeros(num_rows, k_QKD.shape[1], num_slots + most_new, dtype=torch.float32)
    plan = zip(start.tolist(), num_new.tolist(), token[:, 0].tolist())
    for row, (num_before, new, begin) in enumerate(plan):
        counted = new if num_observed is None else min(num_observed, new)
        first, end = begin + new - counted, begin + new
        q, lse = q_QKGD[first:end], lse_QKG[first:end]
        stored = min(num_before, num_slots)
        if slots_PKCD is not None and stored:
            held = slots_PKCD[row, :, :stored].transpose(0, 1)
            total[row, :, :stored] = sums.column_sums(q, held, lse)
        if new:
            own = sums.column_sums(q, k_QKD[begin:end], lse, offset=new - counted)
            total[row, :, num_slots : num_slots + new] = own
    return total


def shapes(
    q_QKGD: torch.Tensor,
    lse_QKG: torch.Tensor,
    k_QKD: torch.Tensor,
    slots_PKCD: torch.Tensor | None,
    start: torch.Tensor,
    num_new: torch.Tensor,
    token: torch.Tensor,
    num_observed: int | None,
) -> torch.Tensor:
    """An empty tensor of the shape of the sums."""
    num_slots = 0 if slots_PKCD is None else slots_PKCD.shape[2]
    size = (token.shape[0], k_QKD.shape[1], num_slots + token.shape[1])
    return q_QKGD.new_empty(size, dtype=torch.float32)
