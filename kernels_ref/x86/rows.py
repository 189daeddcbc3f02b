"""Attention of rows with one bfloat16 query token each, over the units of a store.

Every visible key and value is read once, from where it lies; hidden slots are not read at all, so what they
hold does not matter. Scores, weights and sums are float32.
"""

from __future__ import annotations

import torch

from kernels_ref.partial import Partial
from kernels_ref.x86.library import is_available, require

_PAIRS = 32
_MAX_DIM = 256


def fits(q_NKGD: torch.Tensor, k_XKSD: torch.Tensor) -> bool:
    """Whether ``attend`` can take these queries and keys, here. Compiled code takes the answer as fixed."""
    dim = q_NKGD.shape[3]
    is_cpu_bfloat16 = q_NKGD.dtype == torch.bfloat16 == k_XKSD.dtype and q_NKGD.device.type == "cpu"
    return is_cpu_bfloat16 and dim % _PAIRS == 0 and dim <= _MAX_DIM and is_available()


def attend_blocks(
    q_NKGD: torch.Tensor,
    k_XKSD: torch.Tensor,
    v_XKSD: torch.Tensor,
    owner: torch.Tensor,
    last: torch.Tensor,
    last_visible: torch.Tensor,
) -> Partial:
    """Scaled queries over whole units that they own, and the leading slots of one unit each.

    Args:
        owner: which row sees all of unit ``x``, int32 ``[<= X]``; other numbers than rows mean nobody.
        last, last_visible: for each row another unit and how many of its slots are seen, int32 ``[N]``.

    Raises:
        ValueError: stores that do not go with the queries, or no such kernel here.
    """
    require()
    operator = torch.ops.hpu_duo_x86.attend_blocks.default
    return Partial(*operator(q_NKGD, k_XKSD, v_XKSD, owner, last, last_visible))


def attend_rings(
    q_NKGD: torch.Tensor, k_XKSD: torch.Tensor, v_XKSD: torch.Tensor, visible: torch.Tensor
) -> Partial:
    """Scaled queries over the leading slots of a unit each: row ``n`` sees ``visible[n]`` of unit ``n``.

    Raises:
        ValueError: as for ``attend_blocks``.
    """
    require()
    return Partial(*torch.ops.hpu_duo_x86.attend_rings.default(q_NKGD, k_XKSD, v_XKSD, visible))
