"""Rotations for policies that need them: of a step's tokens, once a step, and of stored keys.

Shapes: Q query tokens, N rows, P prompt rows, X rows of either kind, K key/value heads, C slots, D head size,
F frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels_ref.groups.budget_slots import text_order
from kernels_ref.groups.column_sums import ChunkStep
from kernels_ref.groups.kv_policy import KVPolicy
from kernels_ref.rotary import Turn, composed, turned, turns
from kernels_ref.step import StepTensors
from kernels_ref.units import gather

_TURNED_NUMBERS, _TURNED_ON_CPU = 1 << 22, 1 << 17
"""Elements of stored keys that are rotated at a time: on a CPU as many as fit into a cache."""


class BudgetTurns(NamedTuple):
    """Rotations of a step; without entries where the policy needs none.

    Attributes:
        back: of each token, from its position back to position 0, ``[Q, F]``.
        places: of each token, from its position to its rank among stored tokens, ``[Q, F]``.
        ranks: to each rank among stored tokens, ``[C, F]``.
        ahead: mean of those to the positions after each prompt row, ``[P, F]``.
    """

    back: Turn
    places: Turn
    ranks: Turn
    ahead: Turn


def budget_turns(
    policy: KVPolicy, frequencies: Sequence[float], num_slots: int, t: StepTensors, chunk: ChunkStep
) -> BudgetTurns:
    """Rotations that a policy needs."""
    nothing = turns(t.positions[:0], frequencies[:1] or (0.0,))
    if not policy.needs_rotary:
        return BudgetTurns(nothing, nothing, nothing, nothing)
    # The angles are rounded as in the model, so they cancel out however large they are.
    back = turns(-t.positions, frequencies)
    if policy.positions_in_cache:
        rank = torch.arange(num_slots, dtype=t.positions.dtype, device=t.positions.device)
        place = turns(t.positions + _shift(num_slots, t), frequencies)
        return BudgetTurns(back, composed(back, place), turns(rank, frequencies), nothing)
    number = torch.arange(policy.num_ahead, dtype=t.positions.dtype, device=t.positions.device)
    ahead = turns((chunk.start + chunk.num_new)[:, None] + number, frequencies)
    mean = Turn(ahead.cos.mean(dim=1), ahead.sin.mean(dim=1))
    return BudgetTurns(back, nothing, nothing, mean)


def _shift(num_slots: int, t: StepTensors) -> torch.Tensor:
    """Rank of each token among the stored ones minus its position, 0 or less, int32 ``[Q]``.

    A decoded token has the last rank. A chunk follows the stored tokens of its row.
    """
    no_row = t.row_start.shape[0]
    row = torch.clamp(t.row, max=no_row - 1)
    start, num_new = gather(t.row_start, row), gather(t.row_num_new, row)
    by_decode = torch.clamp(num_slots - 1 - t.positions, max=0)
    return torch.where(num_new == 1, by_decode, torch.clamp(num_slots - start, max=0))


def turned_as(x_QKsD: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Rotate vectors of tokens, ``[Q, ..., D]``, all heads alike; the dtype is preserved.

    Args:
        turn: ``[Q, F]``.
    """
    return turned(x_QKsD, turn.of_heads(x_QKsD.dim() - 2)).to(x_QKsD.dtype)


def turned_by_rank(
    k_XKCD: torch.Tensor, position_XKC: torch.Tensor, valid: torch.Tensor, ranks: Turn
) -> torch.Tensor:
    """Rotate stored keys to their ranks among the stored ones of their head, some heads at a time.

    Args:
        k_XKCD: without rotation; anything where ``valid`` is not set.
        valid: whether there is a token, bool ``[X, 1, C]``.
        ranks: ``[C, F]``.

    Returns:
        Dense ``[X, K, C, D]``, of the keys' type.
    """
    rank, keys = text_order(position_XKC, valid)[1].flatten(0, 1), k_XKCD.flatten(0, 1)
    most = _TURNED_ON_CPU if keys.device.type == "cpu" else _TURNED_NUMBERS
    size = max(1, most // keys[0].numel())
    some = []
    for begin in range(0, len(keys), size):
        k, own = keys[begin : begin + size], rank[begin : begin + size]
        turn = Turn(*(each.view(*own.shape, -1) for each in ranks.at(own.reshape(-1))))
        some.append(turned(k, turn).to(k.dtype))
    return torch.cat(some).view(k_XKCD.shape)


def turning_bytes(num_numbers: int) -> int:
    """Bytes of intermediates while this many elements of stored keys are rotated, in float32."""
    return 6 * 4 * min(num_numbers, _TURNED_NUMBERS)
