import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import BatchShape, BucketTable, CostFunction, Miss, SkippingCost, StepCost, StepLimits
from graphs.planner import ASSUMED, GraphBudget, Resolution, evaluate, plan_table
from graphs.planner.cells import Cells, holds
from graphs.prices import price, to_levels
from hpu_duo.planning.simulation import plan_buckets, prior
from tests.graphs.planner.drawn import limits_strategy, scheduled_shapes
from tests.tiers import crossed, further

LIMITS = StepLimits(
    max_num_seqs=8,
    max_num_batched_tokens=256,
    max_model_len=4096,
    block_size=64,
    num_blocks=200,
    decode_len=1,
    max_chunk_rows=1,
)
QUICK = Resolution(num_cells=200, num_points=60, num_rows=400, rounds=2)
TRAFFIC = {
    BatchShape.parse("--u/q4/s0/u40/l4"): 70.0,
    BatchShape.parse("--u/q8/s0/u90/l8"): 20.0,
    BatchShape.parse("csu/q256/s20/u40/l5"): 10.0,
    BatchShape.parse("c--/q100/s0/u0/l1"): 5.0,
}


@given(st.data())
@settings(max_examples=1, deadline=None)
def test_a_planned_table_has_a_bucket_for_every_step_that_a_scheduler_can_plan(data: st.DataObject) -> None:
    limits = data.draw(limits_strategy)
    num_graphs = data.draw(st.sampled_from([1, 2, 5, 20]))
    seen = {data.draw(scheduled_shapes(limits)): 1.0 for _ in range(3)}
    for traffic in (None, seen):
        table = plan_buckets(limits, num_graphs, traffic=traffic, resolution=QUICK)
        assert 1 <= len(table) <= num_graphs
        assert all(limits.largest.holds(bucket) for bucket in table)
        # A single bucket holds every phase, even where no step has all parts of them.
        assert num_graphs == 1 or {bucket.phase for bucket in table} <= set(limits.reachable_phases)
        for _ in range(8):
            assert not isinstance(table.fit(data.draw(scheduled_shapes(limits))), Miss)


@pytest.mark.parametrize(("uses_blocks", "num_graphs"), [(True, 64), *further((True, 4)), (False, 64)])
def test_every_bucket_is_the_cheapest_of_some_step(uses_blocks: bool, num_graphs: int) -> None:
    tiny = StepLimits(
        max_num_seqs=1,
        max_num_batched_tokens=4,
        max_model_len=64,
        block_size=16,
        num_blocks=4,
        uses_blocks=uses_blocks,
        decode_len=1,
        max_chunk_rows=1,
    )
    table = plan_buckets(tiny, num_graphs, resolution=QUICK)
    sizes = product(tiny.reachable_phases, range(1, 5), range(5), range(5), (1,))
    possible = [
        BatchShape(phase, query_len, shared, unique, rows)
        for phase, query_len, shared, unique, rows in sizes
        if phase.shared >= (shared > 0) and phase.unique >= (unique > 0)
    ]
    assert {table.fit(shape) for shape in possible if tiny.reaches(shape)} == set(table)
    assert {bucket.phase for bucket in table} <= set(tiny.reachable_phases)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_every_reachable_shape_lies_in_a_cell(data: st.DataObject) -> None:
    limits = data.draw(limits_strategy)
    cells = Cells.within(limits, StepCost(block_size=limits.block_size), most=200)
    for _ in range(10):
        levels = np.array(data.draw(scheduled_shapes(limits)).levels)
        same_phase = (cells.highest[:, :3] == levels[:3]).all(axis=1)
        inside = (cells.lowest <= levels).all(axis=1) & (levels <= cells.highest).all(axis=1)
        assert (inside & same_phase).sum() == 1


# Of each table in the file: limits, whether there are blocks, graphs and cost.
KNOWN: dict[str, tuple[tuple[int, ...], bool, int, CostFunction]] = {
    "short texts": ((4, 64, 256, 16, 32, 2), True, 16, StepCost(block_size=16)),
    "padded blocks skipped": ((16, 512, 4096, 32, 512, 4), True, 32, SkippingCost()),
    "one request": ((1, 256, 4096, 128, 64, 1), True, 12, StepCost()),
    "rings alone": ((16, 1024, 8192, 128, 0, 4), False, 24, StepCost(ring_width=384)),
}


@pytest.mark.parametrize("name", crossed(list(KNOWN), fast=("short texts", "padded blocks skipped")))
def test_a_faster_search_finds_the_same_table(name: str) -> None:
    (seqs, tokens, length, block_size, num_blocks, chunks), uses_blocks, num_graphs, cost = KNOWN[name]
    limits = StepLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        block_size=block_size,
        num_blocks=num_blocks,
        uses_blocks=uses_blocks,
        decode_len=1,
        max_chunk_rows=chunks,
    )
    planned = plan_table(limits, num_graphs, prior(limits), cost, blur=ASSUMED)
    known = json.loads(Path("tests/data/planned_tables.json").read_text(encoding="utf-8"))
    assert list(map(str, planned)) == known[name]


@pytest.mark.slow
def test_the_same_input_gives_the_same_table() -> None:
    for traffic in (TRAFFIC, None):
        turned = None if traffic is None else dict(reversed(traffic.items()))
        plans = [plan_buckets(LIMITS, 12, traffic=given, resolution=QUICK) for given in (traffic, turned)]
        assert plans[0] == plans[1]


def test_a_plan_from_traffic_pads_that_traffic_less_than_the_default_table_does() -> None:
    cost = StepCost(block_size=64)
    planned = evaluate(plan_buckets(LIMITS, 12, cost, TRAFFIC).buckets, LIMITS, cost, TRAFFIC)
    default = evaluate(BucketTable.exponential(LIMITS).buckets, LIMITS, cost, TRAFFIC)
    assert planned.holds_all
    assert planned.mean < min(0.1, default.mean)


@pytest.mark.slow
def test_more_graphs_pad_the_prior_less() -> None:
    cost = StepCost(block_size=64)
    means = [
        evaluate(plan_buckets(LIMITS, n, cost, resolution=QUICK).buckets, LIMITS, cost, prior(LIMITS)).mean
        for n in (1, 4, 16, 64)
    ]
    assert means == sorted(means, reverse=True)
    assert means[-1] < 0.25 * means[0]


def test_one_graph_holds_everything() -> None:
    assert plan_buckets(LIMITS, 1).buckets == (LIMITS.largest,)


@pytest.mark.slow
def test_time_and_memory_bound_the_table() -> None:
    in_time = plan_buckets(LIMITS, GraphBudget(64, seconds=50, seconds_per_graph=10), resolution=QUICK)
    assert len(in_time) <= 5
    budget = GraphBudget(64, memory_bytes=2000, bytes_of=lambda shape: float(shape.query_len))
    in_memory = plan_buckets(LIMITS, budget, resolution=QUICK)
    assert sum(bucket.query_len for bucket in in_memory) <= 2000
    assert len(in_memory) > 1
    assert evaluate(in_memory.buckets, LIMITS, StepCost(block_size=64), prior(LIMITS)).holds_all


def test_budgets_that_hold_no_table_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 graph, got 0"):
        plan_buckets(LIMITS, 0)
    with pytest.raises(ValueError, match="5 s does not hold the smallest table: one graph takes 10 s"):
        plan_buckets(LIMITS, GraphBudget(9, seconds=5, seconds_per_graph=10))
    with pytest.raises(ValueError, match=r"255 bytes does not hold the smallest table.* takes 1 bytes more"):
        plan_buckets(LIMITS, GraphBudget(9, memory_bytes=255, bytes_of=lambda shape: shape.query_len))
    with pytest.raises(ValueError, match="expected seconds and seconds_per_graph together"):
        GraphBudget(9, seconds=5)


def test_traffic_of_another_deployment_is_refused() -> None:
    shape = BatchShape.parse("--u/q9/s0/u1/l9")
    with pytest.raises(ValueError, match="shape --u/q9/s0/u1/l9 was recorded under other limits"):
        plan_buckets(LIMITS, 8, traffic={shape: 1})
    with pytest.raises(ValueError, match="at least one shape"):
        plan_buckets(LIMITS, 8, traffic={})
    with pytest.raises(ValueError, match="positive weight"):
        plan_buckets(LIMITS, 8, traffic={BatchShape.parse("--u/q1/s0/u1/l1"): 0})


@pytest.mark.slow
def test_a_cost_that_prices_one_shape_at_a_time_will_do() -> None:
    cost = StepCost(block_size=64)
    plans = [
        plan_buckets(LIMITS, 8, priced, resolution=QUICK) for priced in (cost, lambda shape: cost(shape))
    ]
    assert plans[0].buckets == plans[1].buckets


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_prices_and_holding_of_many_shapes_are_those_of_each(data: st.DataObject) -> None:
    limits = data.draw(limits_strategy)
    cost = StepCost(block_size=limits.block_size, ring_width=data.draw(st.sampled_from([0, 320])))
    shapes = [data.draw(scheduled_shapes(limits)) for _ in range(6)]
    levels = to_levels(shapes)
    assert price(cost, levels) == pytest.approx([cost(shape) for shape in shapes], rel=1e-12)
    assert holds(levels, levels).tolist() == [[a.holds(b) for b in shapes] for a in shapes]
