"""Seconds of a decode's attention in one layer to a context on the host: there, or moved to the device."""

from __future__ import annotations

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
    """Bytes a second, and a fixed cost.

    Attributes:
        link: either way.
        host, device: of keys and values that the host and the device attend to.
        call: seconds of work that is handed to the thread of the host, and of a call of a kernel.
    """

    link: float
    host: float
    device: float
    call: float = 0.0


class HostContextSizes(NamedTuple):
    """Bytes of a layer and a step.

    Attributes:
        contexts: keys and values of all rows that lie on the host, as they are stored.
        queries: of these rows, in the model's dtype.
        triples: partial results of these rows.
        num_tiles: tiles in which the contexts move; each has blocks of one row.
    """

    contexts: float
    queries: float
    triples: float
    num_tiles: int

    @classmethod
    def of(
        cls,
        num_tokens: int,
        num_heads: int,
        head_dim: int,
        contexts: float,
        num_tiles: int,
        dtype_bytes: int = 2,
    ) -> HostContextSizes:
        """Return the sizes of decode tokens; a triple has ``head_dim + 2`` floats for each query head."""
        vectors = num_tokens * num_heads
        triples = vectors * (head_dim + 2) * _FLOAT32
        return cls(contexts, vectors * head_dim * dtype_bytes, triples, num_tiles)

    def attended(self, rates: HostRates) -> float:
        """Seconds of attention on the host: queries there, the contexts read, triples back."""
        return rates.call + (self.queries + self.triples) / rates.link + self.contexts / rates.host

    def moved(self, rates: HostRates) -> float:
        """Seconds of copies to the device, which attends to each tile while the next one is copied.

        Tiles count as if all were of one size.
        """
        if not self.contexts:
            return 0.0
        link, device, tile = rates.link, rates.device, self.contexts / self.num_tiles
        overlapped = max(self.contexts / link + tile / device, tile / link + self.contexts / device)
        return self.num_tiles * rates.call + overlapped
