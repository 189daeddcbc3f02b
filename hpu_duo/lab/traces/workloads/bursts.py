"""Requests that come in crowds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpu_duo.lab.traces.rate import Rate
from hpu_duo.lab.traces.workloads.lone import LoneRequests
from hpu_duo.lab.traces.workloads.workload import check_fields


@dataclass(frozen=True)
class Bursts(LoneRequests):
    """Crowds of requests that come together, as from a script with many threads; crowds come at random.

    Attributes:
        per_s: requests per second on average.
        size: requests of a crowd on average; their number is geometric.
        spread_s: seconds within which a crowd comes, evenly.
    """

    per_s: float = 1.0
    size: float = 20.0
    spread_s: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, size=1, spread_s=0)
        Rate(self.per_s)  # refuses what is out of range

    def times(self, num: int, rng: np.random.Generator) -> list[float]:
        """Draw the times of ``num`` requests."""
        sizes = rng.geometric(1 / self.size, num)
        # More crowds than are needed: each has a request at least.
        begins = Rate(self.per_s / self.size).times(num, rng)
        times = begins.repeat(sizes)[:num]
        return np.sort(times + rng.uniform(0, self.spread_s, num)).tolist()
