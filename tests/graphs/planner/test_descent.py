"""Moving buckets: the total falls, and nothing is dropped on the way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import BatchShape, BucketTable, Miss, StepCost
from graphs.planner.search import Demand, Descent, Duties
from graphs.prices import price, to_levels, to_shapes
from tests.graphs.planner.drawn import limits_strategy, scheduled_shapes


def bucket_of(table: BucketTable, shape: BatchShape) -> BatchShape:
    """The cheapest bucket that has prompts if the shape has, and none if it has none."""
    alike = [bucket for bucket in table if bucket.phase.causal == shape.phase.causal]
    found = BucketTable(tuple(alike), table.cost).fit(shape)
    assert not isinstance(found, Miss)
    return found


def paid(table: BucketTable, shapes: list[BatchShape], weights: list[float]) -> float:
    """Cost of the shapes in their buckets, one by one; beyond one and a half times the own cost, more."""
    total, base = 0.0, sum(weight * table.cost(shape) for shape, weight in zip(shapes, weights))
    for shape, weight in zip(shapes, weights):
        bucket = bucket_of(table, shape)
        own, padded = table.cost(shape), table.cost(bucket)
        total += weight * padded + 0.1 * base / len(shapes) * max(0.0, padded / own - 1.5)
    return total


@pytest.mark.slow
@given(st.data())
@settings(max_examples=20, deadline=None)
def test_a_moved_table_costs_no_more_and_still_does_its_duties(data: st.DataObject) -> None:
    limits = data.draw(limits_strategy)
    cost = StepCost(block_size=limits.block_size)
    shapes = [data.draw(scheduled_shapes(limits)) for _ in range(data.draw(st.integers(1, 12)))]
    weights = [data.draw(st.floats(0.1, 10)) for _ in shapes]
    others = [data.draw(scheduled_shapes(limits)) for _ in range(4)]
    decodes = [limits.largest_of(phase) for phase in limits.reachable_phases if not phase.causal]
    start = [limits.largest, *decodes, *(shape | others[0] for shape in shapes[:4]), *others]
    levels, prices = to_levels(shapes), price(cost, to_levels(shapes))
    duties = Duties(to_levels(others), 1.2 * price(cost, to_levels(others)))
    demand = Demand.of(levels, np.array(weights), prices, 0.5, 0.1)
    descent = Descent(demand, to_levels([*shapes, *others]), cost)
    moved = to_shapes(descent.improve(to_levels(start), duties, rounds=3))
    assert 1 <= len(moved) <= len(start)
    assert moved == to_shapes(descent.improve(to_levels(start), duties, rounds=3))
    assert all(limits.largest.holds(bucket) for bucket in moved)
    table = BucketTable(moved, cost)
    assert paid(table, shapes, weights) <= paid(BucketTable(tuple(start), cost), shapes, weights) * (1 + 1e-9)
    for shape in others:
        assert cost(bucket_of(table, shape)) <= 1.2 * cost(shape) * (1 + 1e-9)


def test_buckets_shrink_to_what_they_serve_and_split_what_differs() -> None:
    cost = StepCost()
    shapes = [
        BatchShape.parse(f"--u/q{q}/s0/u{u}/l{q}") for q, u in ((1, 10), (2, 12), (60, 900), (64, 1000))
    ]
    start = [BatchShape.parse("--u/q100/s0/u2000/l100"), BatchShape.parse("--u/q100/s0/u1500/l100")]
    levels = to_levels(shapes)
    demand = Demand.of(levels, np.ones(4), price(cost, levels), 0.5, 0.1)
    duties = Duties(levels, np.full(4, np.inf))
    moved = Descent(demand, levels, cost).improve(to_levels(start), duties, rounds=8)
    assert sorted(map(str, to_shapes(moved))) == ["--u/q2/s0/u12/l2", "--u/q64/s0/u1000/l64"]
