"""Times of independent requests: Poisson, in bursts, evenly, or all at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rate:
    """Independent gaps between requests, of one mean.

    Attributes:
        per_s: requests per second; infinite lets all come at once.
        burstiness: the shape of the gaps' gamma distribution. 1 is a Poisson process; below 1 requests come
            in bursts (the gaps' coefficient of variation is ``burstiness ** -0.5``), above 1 they come more
            evenly, and infinite is one each ``1 / per_s`` seconds. Its name and meaning are those of vLLM's
            benchmark.

    Raises:
        ValueError: one of them is not above 0.
    """

    per_s: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("per_s", "burstiness"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} above 0, got {getattr(self, name)}")

    def gaps(self, num: int, rng: np.random.Generator) -> np.ndarray:
        """Draw the seconds before each of ``num`` requests; float64 [num]."""
        if math.isinf(self.per_s):
            return np.zeros(num)
        if math.isinf(self.burstiness):
            return np.full(num, 1 / self.per_s)
        return rng.gamma(self.burstiness, 1 / (self.per_s * self.burstiness), num)

    def times(self, num: int, rng: np.random.Generator, *, fixes_mean: bool = False) -> np.ndarray:
        """Draw the times of ``num`` requests, in seconds and in order; float64 [num].

        Args:
            fixes_mean: stretch the times so that the last request comes at ``num / per_s`` exactly. Runs of a
                few hundred requests with different seeds then offer the same load.
        """
        times = np.cumsum(self.gaps(num, rng))
        if fixes_mean and num and times[-1] > 0:
            times *= num / self.per_s / times[-1]
        return times
