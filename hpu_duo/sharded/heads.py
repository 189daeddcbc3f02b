"""The heads of a layer that one rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hpu_duo.device.ranks import Ranks


@dataclass(frozen=True)
class RankHeads:
    """Heads of one layer on one rank, by their numbers in the checkpoint.

    Attributes:
        kv: key/value heads, in the order in which the rank holds them.
        query: query heads, those of a key/value head side by side.
    """

    kv: tuple[int, ...]
    query: tuple[int, ...]

    @classmethod
    def of(
        cls, groups: Sequence[Sequence[int]], num_heads: int, ranks: Ranks, *, is_even: bool = True
    ) -> RankHeads:
        """Return the rank's share of each group of key/value heads.

        With fewer key/value heads than ranks, neighbouring ranks hold the same one, and each of them a share
        of its query heads.

        Args:
            groups: key/value heads of each group.
            num_heads: query heads of the layer.
            is_even: whether ranks have equally many of each group, or only of all groups together.

        Raises:
            ValueError: ranks cannot share a group, or the query heads, evenly.
        """
        num_kv_heads = sum(map(len, groups))
        group_size = num_heads // num_kv_heads
        if ranks.size <= num_kv_heads:
            places = placed([len(group) for group in groups], ranks, is_even=is_even)
            kv = tuple(head for group, place in zip(groups, places) for head in group[place])
            return cls(kv, tuple(head * group_size + i for head in kv for i in range(group_size)))
        copies, rest = divmod(ranks.size, num_kv_heads)
        if rest or group_size % copies or len(groups) > 1:
            raise ValueError(
                f"expected {ranks.size} ranks to share {num_heads} query heads and {num_kv_heads} key/value "
                f"heads in {len(groups)} group(s) evenly"
            )
        head, copy = groups[0][ranks.rank // copies], ranks.rank % copies
        num_query = group_size // copies
        first = head * group_size + copy * num_query
        return cls((head,), tuple(range(first, first + num_query)))


def placed(sizes: Sequence[int], ranks: Ranks, *, is_even: bool) -> tuple[slice, ...]:
    """Return the part of each group of heads that a rank has; neighbours of a group lie side by side.

    Args:
        sizes: heads of each group.
        is_even: see ``RankHeads.of``. Else ranks have as many of a group as others, or one more or less.

    Raises:
        ValueError: ranks cannot share them so.
    """
    for size in sizes if is_even else (sum(sizes),):
        if size % ranks.size:
            raise ValueError(f"expected a group of heads that {ranks.size} ranks share evenly, got {size}")
    # As if heads were dealt one by one, group after group, the last rank first.
    own, following = (
        [first_head(num_dealt, rank, ranks.size) for num_dealt in accumulate(sizes, initial=0)]
        for rank in (ranks.rank, ranks.rank + 1)
    )
    begins, ends = ([upto - before for before, upto in pairwise(each)] for each in (own, following))
    return tuple(map(slice, begins, ends))


def first_head(num_heads: int, rank: int, size: int) -> int:
    """Return the first of ``num_heads`` that a rank has; the last ranks have one more if need be."""
    each, rest = divmod(num_heads, size)
    return rank * each + max(0, rank - (size - rest))
