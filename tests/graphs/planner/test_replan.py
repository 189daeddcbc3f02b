"""Exchanges that lead from one table to another: what holds after each of them."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from graphs import BucketTable, StepCost, StepLimits
from graphs.planner import Resolution, mean_padding, plan_table
from graphs.planner.replan import Replan, replan
from tests.graphs.planner.drawn import limits_strategy, scheduled_shapes

QUICK = Resolution(num_cells=200, num_points=60, num_rows=400, rounds=2)


@given(st.data())
@settings(max_examples=5, deadline=None)
def test_after_each_exchange_every_shape_has_a_bucket_within_the_budget(data: st.DataObject) -> None:
    limits = data.draw(limits_strategy)
    cost = StepCost(block_size=limits.block_size)
    traffics = [
        dict.fromkeys(data.draw(st.lists(scheduled_shapes(limits), min_size=1, max_size=8)), 1.0)
        for _ in range(2)
    ]
    table = plan_table(limits, data.draw(st.integers(2, 12)), traffics[0], cost, resolution=QUICK)
    found = replan(table, limits, traffics[1])
    assert Replan.from_json(found.to_json()) == found
    assert found.padding == mean_padding(table, traffics[1]) or not found.exchanges
    paddings, size = [found.padding], len(table)
    for exchange in found.exchanges:
        assert exchange.dropped in table
        assert exchange.added not in table
        kept = [bucket for bucket in table if bucket != exchange.dropped]
        table = BucketTable((*kept, exchange.added), cost)
        assert len(table) == size
        for phase in limits.reachable_phases:
            assert table.fit(limits.largest_of(phase)) in table
        assert abs(exchange.padding - mean_padding(table, traffics[1])) < 1e-9 * (1 + exchange.padding)
        paddings.append(exchange.padding)
    assert paddings[-1] == min(paddings)


def test_other_traffic_gets_other_buckets_that_pad_it_less() -> None:
    limits = StepLimits(
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=4096,
        block_size=64,
        num_blocks=200,
        max_chunk_rows=1,
        decode_len=1,
    )
    cost = StepCost(block_size=64)
    short, long = (
        dict.fromkeys(BucketTable.from_strings(texts), 1.0)
        for texts in (
            [f"--u/q{n}/s0/u{n}/l{n}" for n in range(1, 9)],
            [f"--u/q{n}/s0/u{20 * n}/l{n}" for n in range(1, 9)],
        )
    )
    table = plan_table(limits, 16, short, cost)
    found = replan(table, limits, long)
    assert found.exchanges
    assert found.exchanges[-1].padding < 0.5 * found.padding
