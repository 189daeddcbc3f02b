"""Rotations of queries for policies that need them, once a step.

Shapes: Q query tokens, N rows, P prompt rows, C slots, F frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels_ref.groups.column_sums import ChunkStep
from kernels_ref.groups.kv_policy import KVPolicy
from kernels_ref.index import gather
from kernels_ref.rotary import Turn, turns
from kernels_ref.step import StepTensors


class BudgetTurns(NamedTuple):
    """Rotations of a step; without entries where the policy needs none.

    Attributes:
        tokens: of each query, to its place among kept tokens, or back to position 0, ``[Q, F]``.
        ahead: mean of those to the positions behind each prompt row, ``[P, F]``.
    """

    tokens: Turn
    ahead: Turn


def budget_turns(
    policy: KVPolicy, frequencies: Sequence[float], num_slots: int, t: StepTensors, chunk: ChunkStep
) -> BudgetTurns:
    """Rotations that a policy needs."""
    nothing = turns(t.positions[:0], frequencies[:1] or (0.0,))
    if not policy.needs_rotary:
        return BudgetTurns(nothing, nothing)
    if policy.num_placed:
        return BudgetTurns(turns(_shift(num_slots, t), frequencies), nothing)
    number = torch.arange(policy.num_ahead, dtype=t.positions.dtype, device=t.positions.device)
    ahead = turns((chunk.start + chunk.num_new)[:, None] + number, frequencies)
    mean = Turn(ahead.cos.mean(dim=1), ahead.sin.mean(dim=1))
    return BudgetTurns(turns(-t.positions, frequencies), mean)


def _shift(num_slots: int, t: StepTensors) -> torch.Tensor:
    """Distance of the place of each token among the kept ones from its position, 0 or less, int32 ``[Q]``.

    A decoded token is the last of the kept ones. A chunk follows what its row has kept.
    """
    no_row = t.row_start.shape[0]
    row = torch.clamp(t.row, max=no_row - 1)
    start, num_new = gather(t.row_start, row), gather(t.row_num_new, row)
    by_decode = torch.clamp(num_slots - 1 - t.positions, max=0)
    return torch.where(num_new == 1, by_decode, torch.clamp(num_slots - start, max=0))
