"""Streams of random choices by name, the same on every platform and Python version."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from hpu_duo.lab.tasks.draws import choice, sample

T = TypeVar("T")


class Draw:
    """A stream of choices, given by a seed and a name.

    Args:
        seed: any integer.
        name: streams of other names are independent of this one.
    """

    def __init__(self, seed: int, name: str = "") -> None:
        # Strings are seeded by their SHA-512, which is the same everywhere.
        self._rng = random.Random(f"{name}/{seed}")

    def below(self, bound: int) -> int:
        """An integer in ``[0, bound)``."""
        return int(self._rng.random() * bound)

    def fraction(self) -> float:
        """A number in ``[0, 1)``."""
        return self._rng.random()

    def choice(self, options: Sequence[T]) -> T:
        """One of the options."""
        return choice(self._rng, options)

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """Choose ``count`` of the options, each at most once.

        Raises:
            ValueError: there are fewer.
        """
        return sample(self._rng, options, count)

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """All options in another order."""
        return self.sample(options, len(options))

    def digits(self, count: int) -> str:
        """A number of ``count`` digits, the first of them not zero."""
        return str(1 + self.below(9)) + "".join(str(self.below(10)) for _ in range(count - 1))

    def uuid(self) -> str:
        """32 hexadecimal digits in the groups of a UUID."""
        groups = (
            "".join("0123456789abcdef"[self.below(16)] for _ in range(size)) for size in (8, 4, 4, 4, 12)
        )
        return "-".join(groups)
