"""From head scores to retrieval heads, layer by layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

BoolArray: TypeAlias = NDArray[np.bool_]
FloatArray: TypeAlias = NDArray[np.floating]
IntArray: TypeAlias = NDArray[np.intp]

TieBreak: TypeAlias = Literal["stable", "reference"]
Balance: TypeAlias = Literal["global", "per_layer", "per_rank"]

# Amplitude of the noise with which the published rule separates equal scores.
REFERENCE_NOISE = 1e-6


def check_sparsity(sparsity: float) -> float:
    """Return ``sparsity`` as a float in [0, 1], or raise ValueError (NaN included)."""
    sparsity = float(sparsity)
    if not 0.0 <= sparsity <= 1.0:
        raise ValueError(f"expected sparsity in [0, 1], got {sparsity}")
    return sparsity


def round_half_up(num_heads: int, sparsity: float, unit_size: int = 1) -> int:
    """Number of retained units of ``unit_size`` heads: ``round(num_heads * (1 - sparsity) / unit_size)``.

    One half rounds up. The sparsity is read as the decimal number it prints as, so 0.9 of 5 heads is exactly
    one half, independent of binary rounding.
    """
    kept = num_heads * (1 - Fraction(str(sparsity))) / unit_size
    return math.floor(kept + Fraction(1, 2))


def keep_above(scores_LK: FloatArray, threshold: float) -> BoolArray:
    """Retrieval heads are those whose raw score is strictly greater than ``threshold``: bool [L, K].

    Source: the deployment rule of the DuoAttention paper (arXiv:2410.10819), ``alpha > tau``.
    """
    if math.isnan(threshold):
        raise ValueError("expected a threshold, got NaN")
    return scores_LK > threshold


def keep_strongest(scores_LK: FloatArray, sparsity: float, balance: Balance, num_ranks: int) -> BoolArray:
    """Choose a fixed number of the heads with the highest raw scores: bool [L, K].

    Heads become streaming heads from the weakest on, equal scores in the order (layer, head). The masks are
    nested: a head that streams at one sparsity streams at every higher one.

    - ``global``: exactly ``round(L*K*(1-sparsity))`` heads of the whole model.
    - ``per_layer``: the same total, spread over the layers as evenly as it divides. Counts of two layers
      differ by at most one; the layers that get one more are those whose next best head scores highest. At
      most two distinct (retrieval, streaming) pairs exist, and one pair when L divides the total.
    - ``per_rank``: the KV heads of each layer are cut into ``num_ranks`` contiguous slices, and all slices of
      a layer have the same number. The j-th best heads of the slices of a layer are chosen together, by their
      mean score, so the total is ``num_ranks * round(L*K*(1-sparsity)/num_ranks)``.
    """
    num_layers, num_kv_heads = scores_LK.shape
    match balance:
        case "global":
            weakest_first_UM = _order_global(scores_LK)[:, None]
        case "per_layer":
            weakest_first_UM = _order_by_level(scores_LK)[:, None]
        case "per_rank":
            weakest_first_UM = _order_by_rank_unit(scores_LK, num_ranks)
        case _:
            raise ValueError(f"expected balance 'global', 'per_layer' or 'per_rank', got {balance!r}")
    num_units, unit_size = weakest_first_UM.shape
    num_kept = round_half_up(num_layers * num_kv_heads, sparsity, unit_size)
    mask = np.zeros(num_layers * num_kv_heads, dtype=np.bool_)
    mask[weakest_first_UM[num_units - num_kept :].ravel()] = True
    return mask.reshape(num_layers, num_kv_heads)


def keep_by_noisy_quantile(scores_LK: FloatArray, sparsity: float, seed: int) -> BoolArray:
    """The rule of the published repository, made deterministic: bool [L, K].

    Scores are clipped to [0, 1], uniform noise in [0, 1e-6) is added to separate equal ones, and a head is a
    retrieval head when it reaches the linearly interpolated ``sparsity`` quantile. The repository draws the
    noise from numpy's global generator and adds it to the caller's array; here it comes from
    ``RandomState(seed)``, which is the same stream as ``numpy.random.seed(seed)``, and the caller's array is
    not changed. The number of chosen heads can differ by one from that of the other rules, and the masks of
    two seeds differ wherever clipped scores tie at the cut.

    Source: ``sparsify_attention_heads`` of mit-han-lab/duo-attention.
    """
    clipped = np.clip(scores_LK.astype(np.float64), 0.0, 1.0)
    noisy = clipped + np.random.RandomState(seed).uniform(0.0, REFERENCE_NOISE, clipped.shape)
    if sparsity >= 1.0:
        return np.zeros(noisy.shape, dtype=np.bool_)
    if sparsity <= 0.0:
        return np.ones(noisy.shape, dtype=np.bool_)
    return noisy >= np.quantile(noisy, sparsity)


def _order_global(scores_LK: FloatArray) -> IntArray:
    """Flat head indices [L*K], weakest first, equal scores by (layer, head)."""
    return np.argsort(scores_LK, axis=None, kind="stable")


def _order_by_level(scores_LK: FloatArray) -> IntArray:
    """Flat head indices [L*K]: the weakest head of each layer, then the second weakest of each, and so on."""
    order = _order_global(scores_LK)
    place_LK = np.empty_like(order)
    place_LK[order] = np.arange(order.size)
    place_LK = place_LK.reshape(scores_LK.shape)
    level_LK = np.argsort(np.argsort(place_LK, axis=1), axis=1)
    return np.lexsort((place_LK.ravel(), level_LK.ravel()))


def _order_by_rank_unit(scores_LK: FloatArray, num_ranks: int) -> IntArray:
    """Units of flat head indices [U, num_ranks], weakest mean first; a unit has one head of each slice."""
    num_layers, num_kv_heads = scores_LK.shape
    slice_size = num_kv_heads // num_ranks
    # R ranks, S heads of a slice; a unit is a column s of the slices sorted weakest first.
    scores_LRS = scores_LK.astype(np.float64).reshape(num_layers, num_ranks, slice_size)
    heads_LRS = np.arange(scores_LK.size).reshape(scores_LRS.shape)
    weakest_first_LRS = np.argsort(scores_LRS, axis=2, kind="stable")
    unit_scores_LS = np.take_along_axis(scores_LRS, weakest_first_LRS, axis=2).mean(axis=1)
    units_LSR = np.take_along_axis(heads_LRS, weakest_first_LRS, axis=2).swapaxes(1, 2)
    return units_LSR.reshape(-1, num_ranks)[np.argsort(unit_scores_LS, axis=None, kind="stable")]


_NEVER = float("inf")


@dataclass(frozen=True)
class CountRule:
    """Bounds on the numbers of retrieval heads of layers.

    Attributes:
        max_kinds: most kinds of layers: distinct pairs of a structure and a number of retrieval heads, each
            of which is compiled for every bucket; None is no bound.
        num_ranks: ranks of a layer, with equally many of its retrieval heads each.

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
        structures: further keys of layers, ``[L]``; None = none.

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
    # cost[v][w]: promoted heads if the needs values[v..w] have the same number.
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
