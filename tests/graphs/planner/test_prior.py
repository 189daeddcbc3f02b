"""The workload that tables are planned for without a recording."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import BucketLimits, BucketTable, StepCost
from graphs.planner import GraphBudget, Resolution, evaluate, plan_table, prior
from graphs.planner.plan import or_default
from graphs.planner.server import Sequence, Server
from hpu_duo.engine.batch import exact_shape
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.request import Request, TokenLimits
from hpu_duo.sampling import SamplingParams
from tests.graphs.planner.drawn import limits_strategy

QUICK = Resolution(num_cells=200, num_points=60, num_rows=400, rounds=2)


@given(limits_strategy)
@settings(max_examples=10, deadline=None)
def test_every_step_of_the_prior_is_reachable(limits: BucketLimits) -> None:
    assert all(limits.reaches(shape) for shape in prior(limits))


def test_the_prior_is_the_same_every_time_and_other_users_are_others() -> None:
    limits = BucketLimits(
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=4096,
        block_size=64,
        num_blocks=200,
        decode_len=1,
        max_chunk_rows=1,
    )
    first = prior(limits)
    kept = dict(first)
    first.clear()
    assert prior(limits) == kept
    assert prior(limits, seed=1) != kept


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_the_model_of_the_scheduler_plans_the_steps_that_the_scheduler_plans(data: st.DataObject) -> None:
    seqs = data.draw(st.integers(1, 5))
    limits = BucketLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + data.draw(st.integers(0, 12)),
        max_model_len=40,
        block_size=data.draw(st.sampled_from([1, 4])),
        num_blocks=data.draw(st.integers(12, 40)),
        uses_blocks=data.draw(st.sampled_from([True, True, False])),
        decode_len=1,
        max_chunk_rows=data.draw(st.integers(1, 3)),
    )
    scheduler = Scheduler(limits)
    server = Server(limits)
    held = min(40, limits.num_blocks * limits.block_size)
    arrivals = data.draw(
        st.lists(
            st.lists(st.tuples(st.integers(1, held - 1), st.integers(1, 12), st.integers(1, 3)), max_size=2)
        )
    )
    number = 0
    while arrivals or scheduler.has_unfinished or not server.is_idle:
        for num_prompt, num_outputs, num_samples in arrivals.pop(0) if arrivals else []:
            num_total = min(num_prompt + num_outputs, held)
            server.add(Sequence(num_prompt, num_total, num_samples))
            params = SamplingParams(max_tokens=num_total - num_prompt, ignore_eos=True)
            parent = Request(f"r{number}", [1] * num_prompt, params, TokenLimits(40))
            scheduler.add(parent)
            for index in range(1, num_samples):
                scheduler.add(parent.sibling(f"r{number}.{index}", sample_index=index, sampling_seed=index))
            number += 1
        plan = scheduler.plan()
        shape, _ = server.step()
        if plan is None:
            assert shape is None
            continue
        assert shape is not None
        wanted = exact_shape(plan, limits.block_size)
        if len(plan.rows) < scheduler.num_running:
            # Which rows wait does not matter for a guess.
            shape, wanted = replace(shape, num_logits=0), replace(wanted, num_logits=0)
        assert shape == wanted
        scheduler.commit(plan, [0] * len(plan.sampled_rows))


def test_a_table_planned_for_the_prior_pads_other_users_less_than_the_default_table_does() -> None:
    limits, cost = (
        BucketLimits(
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=4096,
            block_size=64,
            num_blocks=200,
            decode_len=1,
            max_chunk_rows=1,
        ),
        StepCost(block_size=64),
    )
    planned = plan_table(limits, 24, cost, resolution=QUICK).buckets
    default = BucketTable.exponential(limits, cost=cost).buckets
    others = prior(limits, seed=2)
    assert evaluate(planned, limits, cost, others).mean < evaluate(default, limits, cost, others).mean


def test_the_default_table_is_taken_where_it_costs_less_and_fits_the_budget() -> None:
    limits, cost = (
        BucketLimits(
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=4096,
            block_size=64,
            num_blocks=200,
            decode_len=1,
            max_chunk_rows=1,
        ),
        StepCost(block_size=64),
    )
    default = BucketTable.exponential(limits, cost=cost)
    one_bucket = BucketTable((limits.largest,), cost)
    assert or_default(one_bucket, GraphBudget(len(default)), limits) == default
    assert or_default(one_bucket, GraphBudget(len(default) - 1), limits) == one_bucket
    no_memory = GraphBudget(64, memory_bytes=1, bytes_of=lambda shape: 1.0)
    assert or_default(one_bucket, no_memory, limits) == one_bucket
    planned = plan_table(limits, len(default), cost, resolution=QUICK)
    assert or_default(planned, GraphBudget(64), limits) == planned
