"""Where the heads of a layer lie once retrieval heads come first.

Legend: H query heads, K KV heads, G = H / K query heads that share a KV head (query head h reads KV head h //
    G).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from hpu_duo.heads.pattern import HeadPattern


@dataclass(frozen=True)
class HeadLayout:
    """Order of the heads of one layer: retrieval KV heads first, query heads with their KV head.

    After the permutation ``[0, num_retrieval)`` are the retrieval KV heads and ``[0, num_retrieval_queries)``
    their query heads. Either group may be empty.

    Attributes:
        kv_order: K old head numbers; ``kv_order[new] = old``.
        num_retrieval: retrieval KV heads Kr, the first ones of ``kv_order``.
        num_heads: query heads H, a multiple of K.
    """

    kv_order: tuple[int, ...]
    num_retrieval: int
    num_heads: int

    def __post_init__(self) -> None:
        num_kv_heads = len(self.kv_order)
        if num_kv_heads == 0 or sorted(self.kv_order) != list(range(num_kv_heads)):
            raise ValueError(f"expected kv_order to be a permutation of 0..K-1, got {self.kv_order}")
        if not 0 <= self.num_retrieval <= num_kv_heads:
            raise ValueError(f"expected num_retrieval in [0, {num_kv_heads}], got {self.num_retrieval}")
        if self.num_heads < 1 or self.num_heads % num_kv_heads:
            raise ValueError(
                f"expected num_heads to be a multiple of {num_kv_heads} KV heads, got {self.num_heads}"
            )

    @classmethod
    def from_mask(cls, retrieval: ArrayLike, num_heads: int) -> "HeadLayout":
        """The layout of a layer whose retrieval heads are the True ones of ``retrieval``, bool [K].

        Heads keep their order inside their group, so a layer of one class, and a mask that already has its
        retrieval heads in front, give the identity.
        """
        mask = np.asarray(retrieval)
        if mask.ndim != 1 or mask.dtype != np.bool_:
            raise ValueError(
                f"expected a bool mask of shape [num_kv_heads], got {mask.dtype} {list(mask.shape)}"
            )
        order = (*np.flatnonzero(mask).tolist(), *np.flatnonzero(~mask).tolist())
        return cls(kv_order=order, num_retrieval=int(mask.sum()), num_heads=num_heads)

    @property
    def num_kv_heads(self) -> int:
        """KV heads K."""
        return len(self.kv_order)

    @property
    def num_streaming(self) -> int:
        """Streaming KV heads Ks, the last ones of ``kv_order``."""
        return self.num_kv_heads - self.num_retrieval

    @property
    def group_size(self) -> int:
        """Query heads G that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_retrieval_queries(self) -> int:
        """Query heads of the retrieval KV heads, ``num_retrieval * group_size``."""
        return self.num_retrieval * self.group_size

    @property
    def is_identity(self) -> bool:
        """Whether every head already is where it belongs."""
        return self.kv_order == tuple(range(self.num_kv_heads))

    @cached_property
    def query_order(self) -> tuple[int, ...]:
        """H old query head numbers; ``query_order[new] = old``. Groups move as a whole."""
        size = self.group_size
        return tuple(kv_head * size + member for kv_head in self.kv_order for member in range(size))

    @cached_property
    def kv_inverse(self) -> tuple[int, ...]:
        """K new KV head numbers; ``kv_inverse[old] = new``."""
        return _inverse(self.kv_order)

    @cached_property
    def query_inverse(self) -> tuple[int, ...]:
        """H new query head numbers; ``query_inverse[old] = new``."""
        return _inverse(self.query_order)


def lay_out(pattern: HeadPattern, num_heads: int) -> tuple[HeadLayout, ...]:
    """The layout of every layer of a binarised pattern, for a model with ``num_heads`` query heads per layer.

    Raises ValueError for a raw pattern, or when the pattern's KV heads do not divide ``num_heads``.
    """
    return tuple(HeadLayout.from_mask(row, num_heads) for row in pattern.mask)


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(np.argsort(np.asarray(order)).tolist())
