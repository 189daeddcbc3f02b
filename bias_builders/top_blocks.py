"""Choices of blocks by the text: those that prompts see, by estimated attention, and decodes, by bounds.

Shapes: T tiles of queries, K key/value heads, X blocks of keys.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

_PROTECTED = 1.0e30
"""Rank of blocks that are always seen: above any estimate."""
_NONE = -1.0
"""Rank of blocks that are no candidates: below any estimate."""


@dataclass(frozen=True)
class TopBlocks:
    """A tile of queries sees some blocks: its own, the first, the one before its own, and the best others.

    Tiles and blocks are the same runs of positions, so blocks before a tile are whole. The others are chosen
    by an estimate of the attention that they receive.

    Attributes:
        num_blocks: blocks that a tile sees, its own included.
    """

    num_blocks: int

    def __post_init__(self) -> None:
        if self.num_blocks < 3:
            raise ValueError(
                f"expected blocks >= 3: a tile's own, the one before it and the first; got {self.num_blocks}"
            )

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name and number, for captures and reports."""
        return "top_blocks", self.num_blocks

    def describe(self) -> str:
        """Write the choice as text."""
        return f"top_blocks:blocks={self.num_blocks}"

    def chosen(
        self, mass_TKX: torch.Tensor, may_TX: torch.Tensor, tile_T: torch.Tensor, block_X: torch.Tensor
    ) -> torch.Tensor:
        """Mark the blocks before its own that each tile sees, bool ``[T, K, X]``.

        Args:
            mass_TKX: estimates, float32, 0 or more; anything where ``may_TX`` is False.
            may_TX: blocks of the same text before the tile.
            tile_T, block_X: numbers within the text of tiles and of blocks, int32.
        """
        may = may_TX[:, None].expand(mass_TKX.shape)
        most = self.num_blocks - 1
        if most >= mass_TKX.shape[-1]:
            return may
        is_protected = (block_X == 0) | (block_X == tile_T[:, None] - 1)
        rank = torch.where(is_protected[:, None], _PROTECTED, mass_TKX)
        return highest(torch.where(may, rank, _NONE), block_X.expand(mass_TKX.shape), may, most)


@dataclass(frozen=True)
class Quest:
    """A decoded token sees some pages: its own, the first, the one before its own, and the best others.

    Pages are blocks. The best have the highest scores that keys between the minima and the maxima of the keys
    of a page could have (arXiv:2406.10774).

    Attributes:
        num_pages: blocks that a token sees, its own included.
        every: tokens that use one choice, from positions that are multiples of it.
    """

    num_pages: int
    every: int

    def __post_init__(self) -> None:
        if self.num_pages < 3:
            raise ValueError(
                f"expected pages >= 3: a token's own, the one before it and the first; got {self.num_pages}"
            )
        if self.every < 1:
            raise ValueError(f"expected every >= 1, got {self.every}")

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Name and numbers, for captures and reports."""
        return "quest", self.num_pages, self.every

    def describe(self) -> str:
        """Write the choice as text."""
        return f"quest:pages={self.num_pages},every={self.every}"


def highest(rank: torch.Tensor, position: torch.Tensor, is_valid: torch.Tensor, most: int) -> torch.Tensor:
    """Mark the ``most`` valid entries of the highest rank, of equal ones those of the highest position.

    Args:
        rank: ``[..., S]``, more than ``most`` entries; lower than any valid one where not valid.
        position: int32, 0 or more and distinct among the valid entries of a line.
        is_valid: bool.
    """
    least = torch.topk(rank, most, dim=-1).values.amin(dim=-1, keepdim=True)
    is_above, is_equal = rank > least, rank == least
    latest = torch.topk(torch.where(is_equal & is_valid, position, -1), most, dim=-1).values
    # As many of the equals as are needed: down to this position.
    last = most - is_above.sum(dim=-1, keepdim=True, dtype=torch.int32) - 1
    number = torch.arange(most, dtype=torch.int32, device=rank.device)
    first = torch.where(number == last, latest, -1).amax(dim=-1, keepdim=True)
    return (is_above | (is_equal & (position >= first))) & is_valid
