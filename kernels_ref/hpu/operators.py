"""The fused operators that may be called, and what a device makes of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

ATTENTION, SOFTMAX, BLOCK_SOFTMAX = "sdpa_recomp_fwd", "softmax_fa2", "block_softmax"


class FusedOperators(NamedTuple):
    """The operators of ``torch.ops.hpu`` that are called; fixed for a captured step. See ``try_operators``.

    Attributes:
        attention: ``sdpa_recomp_fwd``.
        softmax: ``softmax_fa2``.
        block_softmax: ``block_softmax``.
        line_bytes: of the cache lines that ``softmax_fa2`` spreads its maxima and sums over, eight numbers in
            each, as a Gaudi 3 does; 0 where they lie side by side.
        inverse_scale: factor that makes the inverse sum of ``sdpa_recomp_fwd`` one over the sum.
    """

    attention: bool = False
    softmax: bool = False
    block_softmax: bool = False
    line_bytes: int = 0
    inverse_scale: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are called."""
        known = ((ATTENTION, self.attention), (SOFTMAX, self.softmax), (BLOCK_SOFTMAX, self.block_softmax))
        return tuple(name for name, is_called in known if is_called)


LINE_BYTES = 256
"""Cache lines of a Gaudi 3."""

NO_OPERATORS = FusedOperators()
"""Nothing is fused: every part is the reference's."""


def exists(name: str) -> bool:
    """Whether this process has a fused operator."""
    return hasattr(torch.ops.hpu, name)
