"""Block-sparse visibility by a table of blocks, and by a table for each head."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bias_builders.rules import Array, Tile


@dataclass(frozen=True)
class BlockTable:
    """A rule by table: tokens of query block ``i`` see the tokens of the key blocks ``rows[i]`` before them.

    Every token sees its own block up to itself, and tokens beyond the table see nothing else.

    Attributes:
        block: positions of a block.
        rows: for each block of queries, the key blocks that it sees, ascending, none after it.
    """

    block: int
    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"expected block >= 1, got {self.block}")
        for number, row in enumerate(self.rows):
            if any(not 0 <= key <= number for key in row) or sorted(set(row)) != list(row):
                raise ValueError(f"expected ascending key blocks of 0 to {number} in row {number}, got {row}")

    @classmethod
    def of(cls, block: int, seen: npt.NDArray[np.bool_]) -> BlockTable:
        """Create it from a square table ``[blocks of queries, blocks of keys]``; later keys are dropped."""
        if seen.ndim != 2 or seen.shape[0] != seen.shape[1]:
            raise ValueError(f"expected a square table, got shape {list(seen.shape)}")
        return cls(block, tuple(tuple(map(int, np.flatnonzero(row))) for row in np.tril(seen)))

    @property
    def key(self) -> tuple[Hashable, ...]:
        """See ``Rule``."""
        return "block_table", self.block, self.rows

    @property
    def sink(self) -> int:
        """None."""
        return 0

    @cached_property
    def _seen(self) -> npt.NDArray[np.bool_]:
        seen = np.eye(max(1, len(self.rows)), dtype=np.bool_)
        for number, row in enumerate(self.rows):
            seen[number, list(row)] = True
        return seen

    @cached_property
    def _counts(self) -> npt.NDArray[np.int64]:
        """Seen blocks above and left of each corner, ``[n + 1, n + 1]``."""
        return np.pad(self._seen.astype(np.int64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))

    def sees(self, query_position: Array, key_position: Array) -> Array:
        """By the table, or in the same block."""
        query, key = query_position // self.block, key_position // self.block
        seen: Any = self._seen
        if isinstance(query_position, torch.Tensor):
            seen = torch.from_numpy(seen).to(query_position.device)
        inside = (query < len(seen)) & (key < len(seen))
        is_seen = seen[query * inside, key * inside] & inside
        return (key_position <= query_position) & (is_seen | (query == key))

    def may_see(self, tile: Tile) -> Array:
        """By the number of seen blocks; exact but for blocks that queries and keys have in common."""
        first_query, last_query, first_key, last_key = (np.asarray(x) // self.block for x in tile)
        share = (first_key <= last_query) & (first_query <= last_key)
        return tile.has_past & (share | (self._count(tile) > 0))

    def sees_all(self, tile: Tile) -> Array:
        """If every pair of blocks is in the table."""
        first_query, last_query, first_key, last_key = (np.asarray(x) // self.block for x in tile)
        is_one = (first_query == last_query) & (first_key == last_key) & (first_query == first_key)
        area = (last_query - first_query + 1) * (last_key - first_key + 1)
        return tile.is_past & (is_one | (self._count(tile) == area))

    def reaches(self, nearest: int, farthest: int) -> bool:
        """Every distance: what is seen depends on positions."""
        return True

    def _count(self, tile: Tile) -> npt.NDArray[np.int64]:
        size = len(self._seen)
        first_query, last_query, first_key, last_key = (np.asarray(x) // self.block for x in tile)
        top, left = (np.minimum(x, size) for x in (first_query, first_key))
        bottom, right = (np.minimum(x + 1, size) for x in (last_query, last_key))
        c = self._counts
        return c[bottom, right] - c[top, right] - c[bottom, left] + c[top, left]


def sees_by_head(tables: Sequence[BlockTable], query_position: Array, key_position: Array) -> Array:
    """Visibility under a table for each head, ``[heads, *]`` for positions that broadcast to ``[*]``."""
    seen = [table.sees(query_position, key_position) for table in tables]
    return torch.stack(seen) if isinstance(query_position, torch.Tensor) else np.stack(seen)
