"""A histogram that is cheap to add to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Histogram:
    """Numbers of observations up to each of some bounds.

    Only one thread adds to it; others may read, and see an observation more or less.

    Args:
        bounds: upper bounds, ascending; one for all others is added.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Observe a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def write(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Put what has been observed into a family of metrics."""
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts):
            total += count
            buckets.append((floatToGoString(bound), total))
        family.add_metric(labels, buckets, self._sum)
