"""The rule from products of queries and keys to weights."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Softmax(str, Enum):
    """``exact``: scores and exponentials in float32. ``fast``: in bfloat16, where the model is."""

    EXACT = "exact"
    FAST = "fast"


class Scoring(NamedTuple):
    """Parameters of a layer's scores besides queries and keys; fixed for a captured step.

    Attributes:
        softcap: bound of the scores, None when the model has none.
        softmax: precision of scores and exponentials.
    """

    softcap: float | None = None
    softmax: Softmax = Softmax.EXACT
