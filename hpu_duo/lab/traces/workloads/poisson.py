"""Independent requests at a steady rate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpu_duo.lab.traces.rate import Rate
from hpu_duo.lab.traces.workloads.lone import LoneRequests


@dataclass(frozen=True)
class Poisson(LoneRequests):
    """Requests whose gaps are independent, exponential unless ``burstiness`` says otherwise.

    Attributes:
        per_s: requests per second; infinite lets all come at once.
        burstiness: see ``Rate``.
    """

    per_s: float = 1.0
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        Rate(self.per_s, self.burstiness)  # refuses what is out of range

    def times(self, num: int, rng: np.random.Generator) -> list[float]:
        """Draw the times of ``num`` requests."""
        return Rate(self.per_s, self.burstiness).times(num, rng).tolist()
