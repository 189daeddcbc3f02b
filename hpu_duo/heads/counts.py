"""Numbers of retrieval heads of layers, chosen so that layers are alike: the one place that optimises them.

Legend: L layers, K KV heads of a layer, V distinct numbers of heads that layers of one structure need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_NEVER = float("inf")


@dataclass(frozen=True)
class CountRule:
    """Bounds on the numbers of retrieval heads of layers.

    Attributes:
        max_kinds: most kinds of layers: distinct pairs of a structure and a number of retrieval heads, each
            of which is compiled for every bucket; None is no bound.
        num_ranks: ranks that share a layer; all hold equally many of its retrieval heads.

    Raises:
        ValueError: a number below 1.
    """

    max_kinds: int | None = None
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if self.max_kinds is not None and self.max_kinds < 1:
            raise ValueError(f"expected max_layer_kinds of 1 or more, got {self.max_kinds}")
        if self.num_ranks < 1:
            raise ValueError(f"expected num_ranks of 1 or more, got {self.num_ranks}")

    def shared(self, count: int) -> int:
        """The least number of heads, ``count`` or more, that ranks share evenly."""
        return -(-count // self.num_ranks) * self.num_ranks


def fewest_promotions(
    needed: Sequence[int], rule: CountRule, structures: Sequence[Hashable] | None = None
) -> tuple[int, ...]:
    """The number of retrieval heads of each layer, none below what it needs, with the smallest sum.

    Beyond its need, a layer has streaming heads promoted to retrieval heads, which lose no accuracy and cost
    bytes.

    Exact. A number that several layers get is the largest need among them, made even for ranks, and layers
    between two of one number have it too; so the layers of a structure, sorted by need, are cut into runs
    (dynamic programming over V needs and the number of runs, ``O(V^2 * max_kinds)``), and structures share
    out ``max_kinds`` in the same way.

    Args:
        needed: retrieval heads that each layer has at least, ``[L]``.
        structures: further keys that tell layers apart, ``[L]``; None = none.

    Raises:
        ValueError: layers have more structures than ``max_kinds``, or a negative need.
    """
    names = [None] * len(needed) if structures is None else list(structures)
    if len(names) != len(needed):
        raise ValueError(f"expected one structure for each of {len(needed)} layers, got {len(names)}")
    if any(count < 0 for count in needed):
        raise ValueError(f"expected needed of 0 or more, got {list(needed)}")
    if rule.max_kinds is None:
        return tuple(map(rule.shared, needed))
    needs: dict[Hashable, Counter[int]] = {}
    for name, count in zip(names, needed):
        needs.setdefault(name, Counter())[count] += 1
    if rule.max_kinds < len(needs):
        raise ValueError(
            f"expected max_layer_kinds of at least {len(needs)}, the structures that layers have whatever "
            f"their heads are, got {rule.max_kinds}"
        )
    choices = [_runs(each, rule, rule.max_kinds) for each in needs.values()]
    levels = dict(zip(needs, _share_out(choices, rule.max_kinds)))
    return tuple(min(level for level in levels[name] if level >= count) for name, count in zip(names, needed))


@dataclass(frozen=True)
class _Choice:
    """Numbers of heads to choose from, and how many heads that promotes."""

    num_promoted: float
    levels: tuple[int, ...]


def _runs(needs: Counter[int], rule: CountRule, most: int) -> list[_Choice]:
    """The best choice of at most 1, 2, ... up to ``most`` numbers for layers of one structure."""
    values = sorted(needs)
    # cost[v][w]: what giving the needs values[v..w] the same number promotes.
    cost = [
        [
            sum(needs[value] * (rule.shared(values[last]) - value) for value in values[first : last + 1])
            for last in range(len(values))
        ]
        for first in range(len(values))
    ]
    # best[v]: for the v smallest needs, with the runs of this round.
    best = [_Choice(0, ())] + [_Choice(_NEVER, ())] * len(values)
    choices: list[_Choice] = []
    for _ in range(min(most, len(values))):
        longer = [best[0]]
        for last, value in enumerate(values):
            tried = (
                _Choice(begun.num_promoted + cost[first][last], (*begun.levels, rule.shared(value)))
                for first, begun in enumerate(best[: last + 1])
            )
            longer.append(min(best[last + 1], *tried, key=lambda choice: choice.num_promoted))
        best = longer
        choices.append(best[-1])
    return choices


def _share_out(structures: list[list[_Choice]], num_kinds: int) -> list[tuple[int, ...]]:
    """The numbers of each structure, at least one, such that all together are at most ``num_kinds``."""
    # best[k]: promoted heads and choices of the structures so far, with k kinds for them.
    best: dict[int, tuple[float, list[tuple[int, ...]]]] = {0: (0, [])}
    for choices in structures:
        longer: dict[int, tuple[float, list[tuple[int, ...]]]] = {}
        for used, (num_promoted, chosen) in best.items():
            for num, choice in enumerate(choices, start=1):
                total = num_promoted + choice.num_promoted
                if used + num <= num_kinds and total < longer.get(used + num, (_NEVER, []))[0]:
                    longer[used + num] = total, [*chosen, choice.levels]
        best = longer
    return min(best.values(), key=lambda each: each[0])[1]
