"""Spread of times, as the fields of vLLM's ``bench serve`` have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Distribution:
    """Values in milliseconds; all 0 where there are none.

    Attributes:
        percentiles: pairs of percentile and value, interpolated linearly.
        num: number of values.
    """

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]
    num: int

    @classmethod
    def of(cls, values_s: Sequence[float], percentiles: Sequence[float]) -> Distribution:
        """Return the distribution of values in seconds."""
        values = np.asarray(values_s if len(values_s) else [0.0]) * 1000
        found = np.percentile(values, percentiles) if len(percentiles) else []
        pairs = tuple((float(at), float(value)) for at, value in zip(percentiles, found))
        return cls(float(values.mean()), float(np.median(values)), float(values.std()), pairs, len(values_s))

    def fields(self, name: str) -> dict[str, float]:
        """Return the values under the names of ``bench serve``: ``mean_ttft_ms``, ``p99_ttft_ms``."""
        return {
            f"mean_{name}_ms": self.mean,
            f"median_{name}_ms": self.median,
            f"std_{name}_ms": self.std,
            **{f"p{at:g}_{name}_ms": value for at, value in self.percentiles},
        }
