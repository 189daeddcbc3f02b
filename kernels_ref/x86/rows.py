"""Attention of decode rows, of a few bfloat16 query tokens each, over the units of a store.

Every visible key and value is read once for a few query heads, in place; slots after the last one that some
token of a row sees are not read, so their content does not matter. Scores, weights and sums are float32.
``fits`` returns whether such kernels are available.

Shapes: N rows of up to M tokens and T tails, K heads, H query heads of a row and head, those of each token
contiguous, X units of S slots, D head size.
"""

from __future__ import annotations

import torch

from kernels_ref.partial import Partial
from kernels_ref.x86.library import is_available

_PAIRS = 32
_MAX_DIM = 256


def fits(q_NKHD: torch.Tensor, k_XKSD: torch.Tensor) -> bool:
    """Whether these queries and keys are supported on this machine; a constant for compiled code."""
    dim = q_NKHD.shape[3]
    is_cpu_bfloat16 = q_NKHD.dtype == torch.bfloat16 == k_XKSD.dtype and q_NKHD.device.type == "cpu"
    return is_cpu_bfloat16 and dim % _PAIRS == 0 and dim <= _MAX_DIM and is_available()


def attend_blocks(
    q_NKHD: torch.Tensor,
    k_XKSD: torch.Tensor,
    v_XKSD: torch.Tensor,
    owner: torch.Tensor,
    tail_block: torch.Tensor,
    tail_visible: torch.Tensor,
) -> Partial:
    """Scaled queries over whole units that their rows own, and the leading slots of a few more.

    Args:
        owner: which row sees all of unit ``x``, int32 ``[<= X]``; numbers that are no row = none.
        tail_block: further units of each row, int32 ``[N, T]``.
        tail_visible: how many of their slots each token sees, int32 ``[N, T, M]``.

    Raises:
        ValueError: stores that do not go with the queries.
    """
    operator = torch.ops.hpu_duo_x86.attend_blocks.default
    return Partial(*operator(q_NKHD, k_XKSD, v_XKSD, owner, tail_block, tail_visible))


def attend_rings(
    q_NKHD: torch.Tensor, k_XKSD: torch.Tensor, v_XKSD: torch.Tensor, visible: torch.Tensor
) -> Partial:
    """Scaled queries over the leading slots of a unit each.

    Args:
        visible: slots of unit ``n`` that each token of row ``n`` sees, int32 ``[N, 1, M]``.

    Raises:
        ValueError: as for ``attend_blocks``.
    """
    return Partial(*torch.ops.hpu_duo_x86.attend_rings.default(q_NKHD, k_XKSD, v_XKSD, visible))


def attend_with_weights(
    q_NKHD: torch.Tensor,
    k_XKSD: torch.Tensor,
    v_XKSD: torch.Tensor,
    visible: torch.Tensor,
    sinks_KH: torch.Tensor | None,
) -> tuple[Partial, torch.Tensor]:
    """Scaled queries of one token a row over the leading slots of a unit each, with the weight of each slot.

    Args:
        visible: slots of unit ``n`` that row ``n`` sees, int32 ``[N, 1, 1]``.
        sinks_KH: logits that count in the weights, or None; the partial is without them.

    Returns:
        The partial, and the weights of each slot summed over query heads, float32 ``[N, K, S]``.

    Raises:
        ValueError: as for ``attend_blocks``.
    """
    operator = torch.ops.hpu_duo_x86.attend_with_weights.default
    *partial, mass = operator(q_NKHD, k_XKSD, v_XKSD, visible, sinks_KH)
    return Partial(*partial), mass


def attend_held(
    q_NKHD: torch.Tensor,
    k_XKSD: torch.Tensor,
    v_XKSD: torch.Tensor,
    position: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    sink: int,
) -> Partial:
    """Scaled queries over the slots of a unit each whose positions lie in an interval; see ``Held``.

    Slots before the last used one must be finite.

    Args:
        position: positions in the slots of unit ``n``, int32 ``[N, K, S]`` or ``[N, 1, S]``.
        begin, end: what each token sees, int32 ``[N, M]``.
        sink: positions that every token sees.

    Raises:
        ValueError: as for ``attend_blocks``.
    """
    operator = torch.ops.hpu_duo_x86.attend_held.default
    return Partial(*operator(q_NKHD, k_XKSD, v_XKSD, position, begin, end, sink))
