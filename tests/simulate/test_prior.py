"""The workload that tables are planned for without a recording."""

from dataclasses import replace

from hypothesis import assume, given, settings

from graphs import BucketTable, StepCost, StepLimits
from graphs.planner import GraphBudget, Resolution, evaluate, or_default
from hpu_duo.planning.simulation import plan_buckets, prior
from tests.graphs.planner.drawn import limits_strategy

QUICK = Resolution(num_cells=200, num_points=60, num_rows=400, rounds=2)
LIMITS = StepLimits(
    max_num_seqs=8,
    max_num_batched_tokens=256,
    max_model_len=4096,
    block_size=64,
    num_blocks=200,
    max_chunk_rows=1,
    decode_len=1,
)
COST = StepCost(block_size=64)


@given(limits_strategy)
@settings(max_examples=2, deadline=None)
def test_every_step_of_the_prior_is_reachable(limits: StepLimits) -> None:
    assume(limits.decode_len <= limits.block_size)  # an engine refuses others
    assert all(limits.reaches(shape) for shape in prior(limits))


def test_the_prior_is_the_same_every_time_and_other_users_are_others() -> None:
    first = prior(LIMITS)
    kept = dict(first)
    first.clear()
    assert prior(LIMITS) == kept
    assert prior(LIMITS, seed=1) != kept


def test_prompts_that_end_at_the_borders_of_a_table_are_padded_less() -> None:
    limits = replace(LIMITS, max_num_seqs=4, max_num_batched_tokens=2048, max_model_len=8192, num_blocks=512)
    table = BucketTable.exponential(limits, cost=COST)
    whole, trimmed = (
        evaluate(table.buckets, limits, COST, prior(limits, seed=2, table=served)) for served in (None, table)
    )
    assert trimmed.missed == 0
    assert trimmed.mean < 0.98 * whole.mean


def test_a_table_planned_for_the_prior_pads_other_users_less_than_the_default_table_does() -> None:
    planned = plan_buckets(LIMITS, 24, COST, resolution=QUICK).buckets
    default = BucketTable.exponential(LIMITS, cost=COST).buckets
    others = prior(LIMITS, seed=2)
    assert evaluate(planned, LIMITS, COST, others).mean < evaluate(default, LIMITS, COST, others).mean


def test_the_default_table_is_taken_where_it_costs_less_and_fits_the_budget() -> None:
    default, others = BucketTable.exponential(LIMITS, cost=COST), prior(LIMITS, seed=1)
    one_bucket = BucketTable((LIMITS.largest,), COST)
    assert or_default(one_bucket, GraphBudget(len(default)), LIMITS, others) == default
    assert or_default(one_bucket, GraphBudget(len(default) - 1), LIMITS, others) == one_bucket
    no_memory = GraphBudget(64, memory_bytes=1, bytes_of=lambda shape: 1.0)
    assert or_default(one_bucket, no_memory, LIMITS, others) == one_bucket
    planned = plan_buckets(LIMITS, len(default), COST, resolution=QUICK)
    assert or_default(planned, GraphBudget(64), LIMITS, others) == planned
