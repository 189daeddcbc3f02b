"""Confidence intervals of shares that were counted in a sample."""

from __future__ import annotations

import math

_Z = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of Wilson, 1927, for a share among ``count`` independent answers.

    It is conservative for scores between 0 and 1: right and wrong answers have the largest variance of all
    scores with the same mean.

    Args:
        share: mean of the sample, in [0, 1].

    Raises:
        ValueError: there is no answer, or the mean lies elsewhere.
    """
    if count < 1 or not 0.0 <= share <= 1.0:
        raise ValueError(f"expected a share in [0, 1] of at least 1 answer, got {share} of {count}")
    shrunk = _Z * _Z / count
    centre = share + shrunk / 2
    reach = math.sqrt(shrunk * (share * (1 - share) + shrunk / 4))
    # Rounding must not put the share itself outside.
    low, high = (centre - reach) / (1 + shrunk), (centre + reach) / (1 + shrunk)
    return max(0.0, min(low, share)), min(1.0, max(high, share))


def interval_fields(name: str, share: float, count: int) -> dict[str, float]:
    """The share and the ends of its interval as fields of a report: ``name``, ``name_low``, ``name_high``."""
    low, high = wilson(share, count)
    return {name: share, f"{name}_low": low, f"{name}_high": high}
