"""Costs of steps, one at a time and many at once."""

from itertools import product

import numpy as np
import pytest

from graphs import BatchShape, Phase, StepCost
from graphs.shape import BroadcastCost, SkippingCost


@pytest.mark.parametrize("cost", [StepCost(ring_width=320), StepCost(), SkippingCost()])
@pytest.mark.parametrize("phase", ["c--", "cs-", "c-u", "csu", "--u", "-su"])
def test_sizes_that_broadcast_cost_what_each_combination_costs(cost: BroadcastCost, phase: str) -> None:
    runs = Phase.parse(phase)
    query, logits = [3, 90], [1, 2, 3]
    shared = [0, 7, 40, 41] if runs.shared else [0]
    unique = [1, 900] if runs.unique else [0]
    axes = np.meshgrid(query, shared, unique, logits, indexing="ij", sparse=True)
    prices = np.broadcast_to(cost.at(runs, *axes), tuple(map(len, (query, shared, unique, logits))))
    expected = [cost(BatchShape(runs, *sizes)) for sizes in product(query, shared, unique, logits)]
    assert prices.ravel() == pytest.approx(expected, rel=1e-12)
