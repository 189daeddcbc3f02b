"""The rule from products of queries and keys to weights."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

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
