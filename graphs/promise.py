"""The padding that a table was planned for, so that a server notices when its traffic is another one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from graphs.cost import CostFunction

_TEXT = re.compile(r"padding: (?P<padding>\S+) by (?P<measure>\w+)")


@dataclass(frozen=True)
class Promise:
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
    def by(cls, cost: CostFunction, padding: float) -> Promise:
        """The padding by a cost."""
        # Rounding may leave a little less than nothing.
        return cls(max(0.0, padding), type(cost).__name__)

    @classmethod
    def find(cls, text: str) -> Promise | None:
        """Read what ``str`` prints from a line of text; None if it is something else.

        Raises:
            ValueError: it promises something that is no padding.
        """
        found = _TEXT.search(text)
        if found is None:
            return None
        try:
            return cls(float(found["padding"]), found["measure"])
        except ValueError as error:
            raise ValueError(f"expected a padding of 0 or more, got {found['padding']!r}") from error

    def is_by(self, cost: CostFunction) -> bool:
        """Say whether padding by a cost can be compared with it."""
        return self.measure == type(cost).__name__

    def __str__(self) -> str:
        return f"padding: {self.padding:.4g} by {self.measure}"
