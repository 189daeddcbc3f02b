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
    """Bytes a second, and fixed costs.

    Attributes:
        link: either way.
        host, device: of keys and values that the host and the device attend to.
        call: seconds of work that is handed to the thread of the host, and of a call of a kernel.
        tile: seconds of a tile whatever its size, where the copies of tiles are in ``device`` too; None =
            ``call``, and copies take as long as ``link`` says.
    """

    link: float
    host: float
    device: float
    call: float = 0.0
    tile: float | None = None

    def with_tiles(self, long: TimedTiles, short: TimedTiles) -> HostRates:
        """Return the same with the cost of tiles by two measurements.

        It is that of a tile of ``long``; the part that depends on bytes is the difference to ``short``.
        """
        seconds, num_bytes = long.seconds / long.number, long.num_bytes / long.number
        less, fewer = seconds - short.seconds / short.number, num_bytes - short.num_bytes / short.number
        of_bytes = min(seconds, max(0.0, less) * num_bytes / fewer) if fewer > 0 else seconds
        device = num_bytes / of_bytes if of_bytes else math.inf
        return self._replace(device=device, tile=seconds - of_bytes)


class TimedTiles(NamedTuple):
    """Tiles that were copied and attended to one behind the other: their bytes, number and seconds."""

    num_bytes: int
    number: int
    seconds: float


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
        if rates.tile is not None:
            return self.num_tiles * rates.tile + self.contexts / rates.device
        link, device, tile = rates.link, rates.device, self.contexts / self.num_tiles
        overlapped = max(self.contexts / link + tile / device, tile / link + self.contexts / device)
        return self.num_tiles * rates.call + overlapped
