"""Rules of visibility, by position: the only place where attention visibility is decided.

Every function works on numpy arrays and on torch tensors alike, broadcasts its arguments, and returns
booleans. Positions are those of the original text: nothing is renumbered when a streaming head evicts tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Any, NamedTuple, Protocol

Array = Any


class Tile(NamedTuple):
    """Queries and keys by position, as two ranges; of numbers, or of arrays of them, one for each tile.

    Attributes:
        first_query, last_query: positions of queries, both included.
        first_key, last_key: positions of keys, both included.
    """

    first_query: Array
    last_query: Array
    first_key: Array
    last_key: Array

    @property
    def nearest(self) -> Array:
        """Least distance back from a query of the tile to a key that is not behind it."""
        distance = self.first_query - self.last_key
        return distance * (distance > 0)

    @property
    def farthest(self) -> Array:
        """Largest distance back from a query to a key; below 0 if all keys are behind all queries."""
        return self.last_query - self.first_key

    @property
    def has_past(self) -> Array:
        """Whether some query has a key of the tile that is not behind it."""
        return self.farthest >= 0

    @property
    def is_past(self) -> Array:
        """Whether no key of the tile is behind any of its queries."""
        return self.first_query >= self.last_key


class TileClass(Enum):
    """Class of a tile: its queries see nothing of its keys, everything, or something between."""

    EMPTY = "empty"
    FULL = "full"
    MIXED = "mixed"


class Rule(Protocol):
    """A choice of the earlier tokens that a token sees; a frozen value of plain numbers.

    Every token sees itself and no later token, so no token is without a key.
    """

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name and numbers, for captures and reports: equal for equal rules only."""
        ...

    @property
    def sink(self) -> int:
        """Number of leading positions that may be seen at any distance, which ``reaches`` ignores."""
        ...

    def sees(self, query_position: Array, key_position: Array) -> Array:
        """Whether a query sees a key; positions of 0 and above."""
        ...

    def may_see(self, tile: Tile) -> Array:
        """False only if no query of the tile sees any of its keys."""
        ...

    def sees_all(self, tile: Tile) -> Array:
        """True only if all queries of the tile see all of its keys."""
        ...

    def reaches(self, nearest: int, farthest: int) -> bool:
        """False only if no token sees any key at these distances back, the first ``sink`` positions apart.

        Usable with static shapes: distances within a row are known when positions are not.
        """
        ...


def classify(rule: Rule, tile: Tile) -> TileClass:
    """Classify a tile; ``MIXED`` if the rule cannot decide."""
    if not rule.may_see(tile):
        return TileClass.EMPTY
    return TileClass.FULL if rule.sees_all(tile) else TileClass.MIXED


class Window(NamedTuple):
    """The rule of a streaming head: the first ``sink`` tokens and the last ``recent`` ones.

    ``sink=0`` is a plain sliding window, or band. ``recent`` counts the query token itself, as
    transformers counts ``sliding_window``.
    """

    sink: int
    recent: int

    @property
    def size(self) -> int:
        """Slots of the ring that stores such a window."""
        return self.sink + self.recent

    def validate(self) -> Window:
        """Return self; raise ``ValueError`` when no token could see itself."""
        if self.sink < 0 or self.recent < 1:
            raise ValueError(f"expected sink >= 0 and recent >= 1, got sink={self.sink} recent={self.recent}")
        return self

    def clipped(self, max_model_len: int) -> Window:
        """The smallest window with the same visibility for positions below ``max_model_len``."""
        sink = min(self.sink, max_model_len)
        return Window(sink, max(1, min(self.recent, max_model_len - sink)))

    @property
    def key(self) -> tuple[Hashable, ...]:
        """See ``Rule``."""
        return "sink_band", self.sink, self.recent

    def sees(self, query_position: Array, key_position: Array) -> Array:
        """See ``sees_streaming``."""
        return sees_streaming(query_position, key_position, self)

    def may_see(self, tile: Tile) -> Array:
        """Exact: keys are near enough, or begin among the sinks."""
        return tile.has_past & ((tile.nearest < self.recent) | (tile.first_key < self.sink))

    def sees_all(self, tile: Tile) -> Array:
        """Exact: all keys but sinks are near enough for the last query."""
        # The farthest key that is no sink.
        beyond = tile.first_key + (self.sink - tile.first_key) * (tile.first_key < self.sink)
        is_near = tile.last_query - beyond < self.recent
        return tile.is_past & (is_near | (tile.last_key < self.sink))

    def reaches(self, nearest: int, farthest: int) -> bool:
        """See ``Rule``."""
        return nearest < self.recent


def sees_causal(query_position: Array, key_position: Array) -> Array:
    """A token sees itself and everything before it."""
    return key_position <= query_position


def sees_streaming(query_position: Array, key_position: Array, window: Window) -> Array:
    """Token ``p`` sees ``k < sink`` or ``p - recent < k``, and never the future.

    Exact per token, so the result does not depend on how a prompt is cut into chunks.
    Source: DuoAttention (arXiv:2410.10819) with StreamingLLM's sinks (arXiv:2309.17453).
    """
    kept = (key_position < window.sink) | (key_position > query_position - window.recent)
    return kept & (key_position <= query_position)
