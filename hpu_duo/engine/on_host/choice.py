"""Seconds of a decode's attention in one layer to a context on the host: there, or moved to the device."""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

_FLOAT32 = 4


class HostDecodes(Enum):
    """The place where decodes attend to blocks of the host."""

    AUTO = "auto"
    """Either, whichever is predicted to be faster in a step."""
    ATTEND = "attend"
    """There; queries and triples cross the link."""
    MOVE = "move"
    """On the device, to which they are copied in each step."""


class HostRates(NamedTuple):
    """Bytes a second.

    Attributes:
        link: either way.
        host, device: of keys and values that the host and the device attend to.
    """

    link: float
    host: float
    device: float


class HostContextSizes(NamedTuple):
    """Bytes of a layer and a step.

    Attributes:
        contexts: keys and values of all rows that lie on the host, as they are stored.
        queries: of these rows, in the model's dtype.
        triples: partial results of these rows.
        tile: of keys and values that move at a time.
    """

    contexts: float
    queries: float
    triples: float
    tile: float

    @classmethod
    def of(
        cls, num_rows: int, num_heads: int, head_dim: int, contexts: float, tile: float, dtype_bytes: int = 2
    ) -> HostContextSizes:
        """Return the sizes of some decode rows; a triple has ``head_dim + 2`` floats for each query head."""
        vectors = num_rows * num_heads
        triples = vectors * (head_dim + 2) * _FLOAT32
        return cls(contexts, vectors * head_dim * dtype_bytes, triples, min(tile, contexts))

    def attended(self, rates: HostRates) -> float:
        """Seconds of attention on the host: queries there, the contexts read, triples back."""
        return (self.queries + self.triples) / rates.link + self.contexts / rates.host

    def moved(self, rates: HostRates) -> float:
        """Seconds of copies to the device, which attends to each tile while the next one is copied."""
        if not self.contexts:
            return 0.0
        last = self.contexts - (math.ceil(self.contexts / self.tile) - 1) * self.tile
        link, device = rates.link, rates.device
        return max(self.contexts / link + last / device, self.tile / link + self.contexts / device)
