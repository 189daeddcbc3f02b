"""A bounded sample of the shapes of steps, and the padding that their table was planned for."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from dataclasses import dataclass

from graphs.cost import CostFunction
from graphs.shape import BatchShape

_TEXT = re.compile(r"padding: (?P<padding>\S+) by (?P<measure>\w+)")


@dataclass(frozen=True)
class PlannedPadding:
    """Padding of the steps that a table was planned for; printed as ``padding: 0.064 by StepCost``.

    Attributes:
        padding: mean cost of padded steps over that of exact ones, minus 1.
        measure: name of the kind of cost; padding by another one is not comparable.

    Raises:
        ValueError: a padding that is negative or no number.
    """

    padding: float
    measure: str

    def __post_init__(self) -> None:
        if not 0.0 <= self.padding < float("inf"):
            raise ValueError(f"expected a padding of 0 or more, got {self.padding}")

    @classmethod
    def by(cls, cost: CostFunction, padding: float) -> PlannedPadding:
        """The padding by a cost."""
        # Rounding may result in slightly less than 0.
        return cls(max(0.0, padding), type(cost).__name__)

    @classmethod
    def find(cls, text: str) -> PlannedPadding | None:
        """Read what ``str`` prints from a line of text; None if it is something else.

        Raises:
            ValueError: the padding is no valid number.
        """
        found = _TEXT.search(text)
        if found is None:
            return None
        try:
            return cls(float(found["padding"]), found["measure"])
        except ValueError as error:
            raise ValueError(f"expected a padding of 0 or more, got {found['padding']!r}") from error

    def is_by(self, cost: CostFunction) -> bool:
        """Whether padding by a cost is comparable."""
        return self.measure == type(cost).__name__

    def __str__(self) -> str:
        return f"padding: {self.padding:.4g} by {self.measure}"


class ShapeReservoir:
    """A uniform sample of at most ``capacity`` of the steps so far, whatever their number.

    A step costs a comparison, and seldom more: the number of steps until the sample changes next is drawn
    beforehand. Deterministic.

    Source: algorithm L of Kim-Hung Li, Reservoir-Sampling Algorithms of Time Complexity O(n(1 + log(N/n))),
    ACM Transactions on Mathematical Software 20 (1994).

    Args:
        capacity: of the sample, at least 1.
        seed: of the random generator.

    Attributes:
        num_steps: number of added steps.

    Raises:
        ValueError: a capacity below 1.
    """

    def __init__(self, capacity: int = 8192, seed: int = 0) -> None:
        if capacity < 1:
            raise ValueError(f"expected a reservoir of at least 1 shape, got {capacity}")
        self.num_steps = 0
        self._capacity, self._chance = capacity, random.Random(seed)
        self._kept: list[BatchShape] = []
        self._next, self._log_weight = 1, 0.0

    def add(self, shape: BatchShape) -> None:
        """Add a step."""
        self.num_steps += 1
        if self.num_steps == self._next:
            self._take(shape)

    def _take(self, shape: BatchShape) -> None:
        self._next += 1
        if len(self._kept) < self._capacity:
            self._kept.append(shape)
        else:
            self._kept[self._chance.randrange(self._capacity)] = shape
        if len(self._kept) == self._capacity:
            self._log_weight += self._log_uniform() / self._capacity
            self._next += math.floor(self._log_uniform() / math.log(-math.expm1(self._log_weight)))

    def _log_uniform(self) -> float:
        """Logarithm of a number between 0 and 1, both excluded."""
        return math.log(self._chance.random() or 0.5)

    def counts(self) -> dict[BatchShape, int]:
        """Count each shape in the sample."""
        return dict(Counter(self._kept))
