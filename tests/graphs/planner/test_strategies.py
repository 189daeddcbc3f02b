from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import BatchShape, BucketTable, Miss, StepCost, StepLimits
from graphs.planner import evaluate, exponential, linear, padding_aware, upstream_unified
from graphs.prices import to_levels, to_shapes
from tests.graphs.planner.drawn import limits_strategy, scheduled_shapes


@pytest.mark.parametrize(
    ("limits", "num_graphs", "num_causal"),
    [
        (
            StepLimits(
                max_num_seqs=128,
                max_num_batched_tokens=8192,
                max_model_len=4352,
                block_size=128,
                num_blocks=4107,
                decode_len=1,
                max_chunk_rows=1,
            ),
            125,
            108,
        ),
        (
            StepLimits(
                max_num_seqs=64,
                max_num_batched_tokens=8192,
                max_model_len=131_072,
                block_size=128,
                num_blocks=4000,
                decode_len=1,
                max_chunk_rows=1,
            ),
            293,
            252,
        ),
        (
            StepLimits(
                max_num_seqs=16,
                max_num_batched_tokens=2048,
                max_model_len=8192,
                block_size=128,
                num_blocks=1000,
                decode_len=1,
                max_chunk_rows=1,
            ),
            319,
            280,
        ),
        (
            StepLimits(
                max_num_seqs=256,
                max_num_batched_tokens=8192,
                max_model_len=40_960,
                block_size=128,
                num_blocks=7593,
                decode_len=1,
                max_chunk_rows=1,
            ),
            107,
            90,
        ),
    ],
)
def test_the_unified_strategy_makes_as_many_graphs_as_upstream(
    limits: StepLimits, num_graphs: int, num_causal: int
) -> None:
    buckets = upstream_unified(limits)
    assert len(buckets) == len(set(buckets)) == num_graphs
    assert sum(bucket.phase.causal for bucket in buckets) == num_causal


def test_the_unified_strategy_serves_a_single_sequence() -> None:
    assert upstream_unified(
        StepLimits(
            max_num_seqs=1,
            max_num_batched_tokens=64,
            max_model_len=256,
            block_size=16,
            num_blocks=32,
            decode_len=1,
            max_chunk_rows=1,
        )
    )


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_grid_pads_as_its_table_of_buckets_does(data: st.DataObject) -> None:
    limits = data.draw(limits_strategy.filter(lambda limits: limits.num_blocks < 60))
    grid = data.draw(st.sampled_from([exponential, padding_aware]))(limits)
    table = BucketTable(grid.buckets())
    assert len(table) <= len(grid)
    shape = data.draw(scheduled_shapes(limits))
    padded = to_shapes(grid.pad(to_levels([shape])))[0]
    assert padded in table
    assert padded.phase == shape.phase
    assert padded.holds(shape)


def test_linear_sizes_are_doubled_up_to_the_step_and_then_added() -> None:
    grid = linear(
        StepLimits(
            max_num_seqs=96,
            max_num_batched_tokens=500,
            max_model_len=1000,
            block_size=128,
            num_blocks=400,
            decode_len=1,
            max_chunk_rows=1,
        )
    )
    sizes = next(sizes for phase, sizes in grid.sizes.items() if str(phase) == "--u")
    assert sizes[0].tolist() == [1, 2, 4, 8, 16, 32, 64, 96]
    assert sizes[2].tolist() == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 400]


def test_padding_aware_sizes_are_at_most_a_quarter_apart() -> None:
    limits = StepLimits(
        max_num_seqs=96,
        max_num_batched_tokens=8192,
        max_model_len=1000,
        block_size=128,
        num_blocks=4000,
        decode_len=1,
        max_chunk_rows=1,
    )
    points = next(sizes for phase, sizes in padding_aware(limits).sizes.items() if str(phase) == "c--")[0]
    assert points[0] == 128
    assert points[-1] == 8192
    # Below the step times four, the step itself is more than a quarter.
    assert all((b - a - 1) / b <= 0.25 for a, b in pairwise(points) if a >= 4 * 128)
    assert len(points) < 8192 // 128 / 2


@pytest.mark.parametrize("decode_len", [1, 2])
def test_the_worst_reachable_padding_is_that_of_every_shape_tried_one_by_one(decode_len: int) -> None:
    limits = StepLimits(
        max_num_seqs=3,
        max_num_batched_tokens=6,
        max_model_len=12,
        block_size=4,
        num_blocks=4,
        decode_len=decode_len,
        max_chunk_rows=1,
    )
    cost = StepCost(block_size=4, hidden_size=8, num_layers=1, vocab_size=64)
    # Two tokens without prompts, in one row or in two, are the least that runs in a bucket for prompts.
    alone = [f"{phase}/q1/s{num_shared}/u4/l3" for phase, num_shared in (("--u", 0), ("-su", 4))]
    table = BucketTable.from_strings([*alone, "csu/q6/s4/u4/l3", "c-u/q4/s0/u1/l2"], cost)
    reachable = [
        shape
        for phase in limits.reachable_phases
        for q in range(1, 7)
        for s in range(5 if phase.shared else 1)
        for u in range(5 if phase.unique else 1)
        for n in range(1, 4)
        if limits.reaches(shape := BatchShape(phase, q, s, u, n))
    ]
    worst = 0.0
    for shape in reachable:
        bucket = table.fit(shape)
        assert not isinstance(bucket, Miss)
        worst = max(worst, cost(bucket) / cost(shape) - 1)
    report = evaluate(table.buckets, limits, cost, dict.fromkeys(reachable, 1.0))
    assert report.worst_reachable == pytest.approx(worst)
    assert report.worst == pytest.approx(worst)
    assert report.holds_all
    assert report.missed == 0


def test_steps_without_a_bucket_are_counted_and_left_out_of_the_mean() -> None:
    limits = StepLimits(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        block_size=16,
        num_blocks=8,
        decode_len=1,
        max_chunk_rows=1,
    )
    held, missed = BatchShape.parse("--u/q1/s0/u1/l1"), BatchShape.parse("c--/q16/s0/u0/l1")
    report = evaluate((held,), limits, StepCost(), {held: 3, missed: 1})
    assert (report.missed, report.mean, report.holds_all) == (0.25, 0.0, False)
