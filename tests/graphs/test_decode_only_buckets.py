"""Steps without prompts run in buckets that have their parts, and no others."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import (
    BatchShape,
    BucketTable,
    CostFunction,
    ExponentialRule,
    Miss,
    Phase,
    SkippingCost,
    StepCost,
    StepLimits,
)
from graphs.planner import Resolution
from graphs.table import decode_only_buckets
from hpu_duo.planning.simulation import plan_buckets
from tests.graphs.planner.drawn import limits_of, scheduled_shapes

COSTS = st.sampled_from([StepCost(block_size=16), StepCost(operations_per_launch=0.0), SkippingCost()])
QUICK = Resolution(num_cells=80, num_points=30, num_rows=200, rounds=1)


def assert_decodes_run_alone(table: BucketTable, limits: StepLimits, data: st.DataObject, times: int) -> None:
    assert decode_only_buckets(table, limits, table.cost) == ()
    for _ in range(times):
        shape = data.draw(scheduled_shapes(limits, has_prompts=False))
        bucket = table.fit(shape)
        assert not isinstance(bucket, Miss)
        assert bucket.phase == shape.phase


@given(limits_of(st.integers(1, 3)), COSTS, st.booleans(), st.data())
@settings(max_examples=40, deadline=None)
def test_an_exponential_table_has_buckets_for_decodes_alone(
    limits: StepLimits, cost: CostFunction, merge_unique: bool, data: st.DataObject
) -> None:
    rule = ExponentialRule(slack=data.draw(st.sampled_from([1.25, 2.0, 8.0])), merge_unique=merge_unique)
    assert_decodes_run_alone(BucketTable.exponential(limits, rule, cost), limits, data, 10)


@pytest.mark.slow
@given(limits_of(st.integers(1, 3)), COSTS, st.data())
@settings(max_examples=3, deadline=None)
def test_a_planned_table_has_buckets_for_decodes_alone(
    limits: StepLimits, cost: CostFunction, data: st.DataObject
) -> None:
    num_graphs = data.draw(st.sampled_from([3, 12]))
    seen = {data.draw(scheduled_shapes(limits)): 1.0 for _ in range(3)}
    for traffic in (None, seen):
        table = plan_buckets(limits, num_graphs, cost, traffic, resolution=QUICK)
        assert len(table) <= num_graphs
        assert_decodes_run_alone(table, limits, data, 10)


TINY = StepLimits(
    max_num_seqs=3,
    max_num_batched_tokens=6,
    max_model_len=32,
    block_size=16,
    num_blocks=3,
    decode_len=1,
    max_chunk_rows=1,
)
DECODES = [
    shape
    for phase in map(Phase.parse, ("--u", "-su"))
    for shape in (
        BatchShape(phase, q, s, u, n)
        for q, s, u, n in product(range(1, 4), range(4), range(4), range(1, 4))
        if s == 0 or phase.shared
    )
    if TINY.reaches(shape)
]


@given(st.lists(scheduled_shapes(TINY), min_size=1, max_size=6), COSTS)
@settings(max_examples=60, deadline=None)
def test_twins_are_missing_exactly_where_some_decodes_would_run_parts_in_vain(
    buckets: list[BatchShape], cost: CostFunction
) -> None:
    def goes_wrong(table: BucketTable) -> bool:
        found = ((table.fit(shape), shape) for shape in DECODES)
        return any(not isinstance(bucket, Miss) and bucket.phase != shape.phase for bucket, shape in found)

    table = BucketTable(tuple(buckets), cost)
    twins = decode_only_buckets(table, TINY, cost)
    assert bool(twins) == goes_wrong(table)
    assert not goes_wrong(table.with_buckets(twins))


def test_two_graphs_are_one_for_everything_and_one_for_decodes() -> None:
    assert plan_buckets(TINY, 2).buckets == (TINY.largest_of(Phase.parse("--u")), TINY.largest)
    assert TINY.largest_of(Phase.parse("-su")) in plan_buckets(TINY, 3).buckets


def test_a_bucket_is_missing_only_where_decodes_would_be_cheaper_with_a_causal_part() -> None:
    limits = StepLimits(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=4096,
        block_size=16,
        num_blocks=2000,
        decode_len=1,
        max_chunk_rows=1,
        uses_blocks=True,
    )
    cost = StepCost(block_size=16)
    decodes, mixed = BatchShape.parse("--u/q8/s0/u2000/l8"), BatchShape.parse("c-u/q12/s0/u100/l4")
    assert cost(mixed) < cost(decodes)
    assert decode_only_buckets((decodes, mixed), limits, cost) == (BatchShape.parse("--u/q4/s0/u100/l4"),)
    dear = BatchShape.parse("c-u/q64/s0/u1990/l4")
    assert cost(dear) > cost(decodes)
    assert decode_only_buckets((decodes, dear), limits, cost) == ()
