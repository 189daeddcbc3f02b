"""Rounding of budgets up to few sizes, since each size is a kind of head group of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Quantised:
    """Budgets of few sizes.

    Attributes:
        budgets: by layer and head.
        num_promoted: tokens that they hold beyond those asked for, of all heads.
    """

    budgets: tuple[tuple[int, ...], ...]
    num_promoted: int


def quantised(budgets: Sequence[Sequence[int]], num_sizes: int) -> Quantised:
    """Round budgets up to at most ``num_sizes`` different ones, with the fewest tokens added.

    Args:
        budgets: by layer and head, at least 1 each.

    Raises:
        ValueError: no budget, one below 1, or no size.
    """
    asked = sorted(each for heads in budgets for each in heads)
    if num_sizes < 1 or not asked or asked[0] < 1:
        raise ValueError(f"expected budgets and sizes of 1 or more, got {asked[:1]} and {num_sizes} sizes")
    values = sorted(set(asked))
    counts = [asked.count(value) for value in values]
    # Held tokens of the first values, and their sizes: each stretch of values has its largest as its size.
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    best += [(values[end] * sum(counts[: end + 1]), (values[end],)) for end in range(len(values))]
    for _ in range(num_sizes - 1):
        best = [best[0]] + [
            min(
                (best[start][0] + values[end] * sum(counts[start : end + 1]), (*best[start][1], values[end]))
                for start in range(end + 1)
            )
            for end in range(len(values))
        ]
    held, sizes = best[-1]
    rounded = tuple(tuple(min(size for size in sizes if size >= each) for each in heads) for heads in budgets)
    return Quantised(rounded, held - sum(asked))
