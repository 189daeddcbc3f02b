"""Lengths of prompts and outputs as people describe them: a median and a spread."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Lengths:
    """Log-normal numbers of tokens, at least 1.

    Attributes:
        median: tokens.
        sigma: standard deviation of the logarithm; 0 gives every request the median. Outputs of chats have
            about 1: the longest of a hundred is ten times the median.

    Raises:
        ValueError: a median below 1, or a sigma below 0.
    """

    median: float
    sigma: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.median < math.inf or not 0 <= self.sigma < math.inf:
            raise ValueError(f"expected a median of at least 1 and a sigma of at least 0, got {self}")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read ``512``, or ``512~0.8`` with a sigma; ValueError for something else."""
        median, separator, sigma = text.partition("~")
        try:
            return cls(float(median), float(sigma) if separator else 0.0)
        except ValueError:
            raise ValueError(
                f"expected a length such as 512, or 512~0.8 with a spread, got {text!r}"
            ) from None

    def draw(self, num: int, rng: np.random.Generator) -> list[int]:
        """Draw ``num`` lengths."""
        drawn = np.exp(rng.normal(math.log(self.median), self.sigma, num))
        return np.maximum(1, np.rint(drawn)).astype(int).tolist()
