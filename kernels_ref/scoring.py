"""The rule from products of queries and keys to weights."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

from kernels_ref.chunks import DEFAULT_BOUNDS, ChunkBounds
from kernels_ref.slices import DEFAULT_SLICES, Slices


class Softmax(str, Enum):
    """``exact``: scores and exponentials in float32. ``fast``: in bfloat16, where the model is."""

    EXACT = "exact"
    FAST = "fast"


class Scoring(NamedTuple):
    """Parameters of a layer's parts besides tensors; fixed for a captured step.

    Attributes:
        softcap: bound of the scores, None when the model has none.
        softmax: precision of scores and exponentials.
        slices: sizes of what is computed at a time.
        chunks: bounds of chunks of context, from which their sizes follow.
    """

    softcap: float | None = None
    softmax: Softmax = Softmax.EXACT
    slices: Slices = DEFAULT_SLICES
    chunks: ChunkBounds = DEFAULT_BOUNDS


def soften(products: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Scores, squeezed into ``(-softcap, softcap)`` when the model asks for it.

    Returns:
        float32, or bfloat16 where the products are and ``scoring`` is fast.
    """
    stays = scoring.softmax is Softmax.FAST and products.dtype == torch.bfloat16
    scores = products if stays else products.float()
    cap = scoring.softcap
    return scores if cap is None else cap * torch.tanh(scores / cap)
