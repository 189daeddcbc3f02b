"""Prices of buckets that differ in one size are those of the buckets."""

from __future__ import annotations

import numpy as np
import pytest

from graphs import StepCost
from graphs.planner.cells import price_along
from graphs.prices import price
from graphs.shape import CostFunction, SkippingCost


@pytest.mark.parametrize("cost", [StepCost(ring_width=80), SkippingCost()], ids=str)
@pytest.mark.parametrize("phase", [(1, 1, 1), (0, 0, 1), (1, 0, 0)], ids=str)
def test_a_price_is_the_same_bit_for_bit_alone_and_beside_others(
    cost: CostFunction, phase: tuple[int, int, int]
) -> None:
    bucket = np.array([*phase, 37, 11, 1001, 29], dtype=np.int64)
    for column in range(7):
        sizes = np.array([0, 1] if column < 3 else [1, 3, 700, 2047], dtype=np.int64)
        buckets = np.repeat(bucket[None], len(sizes), axis=0)
        buckets[:, column] = sizes
        assert price_along(cost, bucket, column, sizes).tolist() == price(cost, buckets).tolist()
