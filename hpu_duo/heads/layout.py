"""Order of the heads of a layer in which those of a group are neighbours.

Legend: H query heads, K KV heads, G = H / K query heads that share a KV head (query head h reads KV head h //
    G).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class HeadLayout:
    """Order of the heads of one layer: KV heads group by group, query heads with their KV head.

    Attributes:
        kv_order: K old head numbers; ``kv_order[new] = old``.
        num_heads: query heads H, a multiple of K.
    """

    kv_order: tuple[int, ...]
    num_heads: int

    def __post_init__(self) -> None:
        num_kv_heads = len(self.kv_order)
        if num_kv_heads == 0 or sorted(self.kv_order) != list(range(num_kv_heads)):
            raise ValueError(f"expected kv_order to be a permutation of 0..K-1, got {self.kv_order}")
        if self.num_heads < 1 or self.num_heads % num_kv_heads:
            raise ValueError(
                f"expected num_heads to be a multiple of {num_kv_heads} KV heads, got {self.num_heads}"
            )

    @classmethod
    def by_group(cls, group_of: ArrayLike, num_heads: int) -> "HeadLayout":
        """Make the layout of a layer whose KV heads belong to groups of these numbers, int [K].

        Heads keep their order inside their group, so a layer of one group, and one whose groups are in
        order already, give the identity.
        """
        numbers = np.asarray(group_of)
        if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
            raise ValueError(
                f"expected a group number of each KV head, int [num_kv_heads], "
                f"got {numbers.dtype} {list(numbers.shape)}"
            )
        return cls(tuple(np.argsort(numbers, kind="stable").tolist()), num_heads)

    @property
    def num_kv_heads(self) -> int:
        """KV heads K."""
        return len(self.kv_order)

    @property
    def group_size(self) -> int:
        """Query heads G that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_identity(self) -> bool:
        """Whether the order of heads is unchanged."""
        return self.kv_order == tuple(range(self.num_kv_heads))

    @cached_property
    def query_order(self) -> tuple[int, ...]:
        """H old query head numbers; ``query_order[new] = old``. Groups move as a whole."""
        size = self.group_size
        return tuple(kv_head * size + member for kv_head in self.kv_order for member in range(size))
