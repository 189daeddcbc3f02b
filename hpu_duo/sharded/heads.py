"""The heads of a layer that one rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        sizes: heads of each group; of two groups at most if they are not shared evenly.
        is_even: see ``RankHeads.of``.

    Raises:
        ValueError: ranks cannot share them so.
    """
    for size in sizes if is_even else (sum(sizes),):
        if size % ranks.size:
            raise ValueError(f"expected a group of heads that {ranks.size} ranks share evenly, got {size}")
    if is_even:
        return tuple(_even(size, ranks) for size in sizes)
    assert len(sizes) <= 2, f"one group, and what it leaves of each rank, got {len(sizes)}"
    begin, end = (first_head(sizes[0], rank, ranks.size) for rank in (ranks.rank, ranks.rank + 1))
    rest = _even(sum(sizes), ranks)
    return (slice(begin, end), slice(rest.start - begin, rest.stop - end))[: len(sizes)]


def first_head(num_heads: int, rank: int, size: int) -> int:
    """Return the first of ``num_heads`` that a rank has; the last ranks have one more if need be."""
    each, rest = divmod(num_heads, size)
    return rank * each + max(0, rank - (size - rest))


def _even(num_heads: int, ranks: Ranks) -> slice:
    each = num_heads // ranks.size
    return slice(ranks.rank * each, (ranks.rank + 1) * each)
