"""Calibration in the manner of FastGen: the cheapest set for each head that recovers enough attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpu_duo.heads.eviction.fastgen import TokenClasses
from hpu_duo.lab.kv_calibration.calibrated import PlannedHead
from hpu_duo.lab.kv_calibration.collect import LayerAttention
from hpu_duo.lab.kv_calibration.fastgen import (
    Kind,
    KindShares,
    cheapest_kinds,
    check_share,
    fastgen_plan,
    kind_shares,
)
from hpu_duo.lab.kv_calibration.methods import CalibrationMethod, Measurement, PlannedLayers


@dataclass(frozen=True)
class FastGen(CalibrationMethod):
    """Settings.

    Attributes:
        threshold: share of the attention to be recovered, in (0, 1].
        window, heavy: shares of a prompt's tokens, in (0, 1], that the window and heavy hitters are.
        queries: last tokens whose attention is measured; None for all.

    Raises:
        ValueError: a number out of range.
    """

    threshold: float = 0.95
    window: float = 0.3
    heavy: float = 0.3
    queries: int | None = None
    needs_classes = True

    def __post_init__(self) -> None:
        for name in ("threshold", "window", "heavy"):
            check_share(name, getattr(self, name))
        if self.queries is not None and self.queries < 1:
            raise ValueError(f"expected 1 query or more to measure, got {self.queries}")

    @property
    def num_queries(self) -> int | None:
        """All, unless told."""
        return self.queries

    def shortest(self, lengths: Sequence[int]) -> int:
        """Two tokens: the first one has nothing to choose from."""
        return 2

    def measurement(self, num_layers: int, lengths: Sequence[int]) -> Measurement:
        """Begin to measure."""
        return _Sharing(self, num_layers)


class _Sharing(Measurement):
    """Shares that each kind recovers, by prompt, layer and head."""

    def __init__(self, method: FastGen, num_layers: int) -> None:
        self._method = method
        self._shares: list[list[KindShares]] = [[] for _ in range(num_layers)]

    def take(self, layer: int, attention: LayerAttention, classes: TokenClasses | None) -> None:
        assert classes is not None, "the method asks for them"
        method = self._method
        self._shares[layer].append(kind_shares(attention.tiles, classes, method.window, method.heavy))

    def planned(self, num_sizes: int) -> PlannedLayers:
        choices = [cheapest_kinds(shares, self._method.threshold) for shares in self._shares]
        plan, _ = fastgen_plan(choices, num_sizes)
        return tuple(
            tuple(
                PlannedHead(
                    choice.kind.name.lower(),
                    keep,
                    None if choice.kind is Kind.FULL else max(2, choice.budget),
                    choice.recovered,
                )
                for choice, keep in zip(heads, keeps)
            )
            for heads, keeps in zip(choices, plan.layers)
        )
