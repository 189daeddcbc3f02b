from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import BatchShape, BucketTable, ExponentialRule, Miss, Phase, StepCost, StepLimits
from tests.graphs.planner.drawn import limits_strategy, scheduled_shapes

LIMITS = StepLimits(
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    max_model_len=32768,
    block_size=128,
    num_blocks=2048,
    decode_len=1,
    max_chunk_rows=1,
)


small_shapes = st.builds(
    lambda phase, q, s, u, n: BatchShape(phase, q, s if phase.shared else 0, u if phase.unique else 0, n),
    st.builds(Phase, st.booleans(), st.booleans(), st.booleans()),
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 5),
)


@given(st.lists(small_shapes, max_size=30), small_shapes)
def test_fit_returns_the_cheapest_bucket_that_holds_the_shape(
    buckets: list[BatchShape], shape: BatchShape
) -> None:
    table = BucketTable(tuple(buckets), StepCost(block_size=4))
    holding = [
        bucket
        for bucket in buckets
        if set(str(bucket.phase)) >= set(str(shape.phase)) - {"-"}
        and bucket.query_len >= shape.query_len
        and bucket.num_shared_blocks >= shape.num_shared_blocks
        and bucket.num_unique_blocks >= shape.num_unique_blocks
        and bucket.num_logits >= shape.num_logits
    ]
    found = table.fit(shape)
    if not holding:
        assert isinstance(found, Miss)
        assert found.shape == shape
        assert set(found.nearest) <= set(buckets)
        assert len(found.nearest) == min(3, len(set(buckets)))
    else:
        assert found in holding
        assert table.cost(found) == min(map(table.cost, holding))


def test_fit_breaks_ties_of_cost_towards_the_smaller_bucket() -> None:
    table = BucketTable.from_strings(["csu/q8/s0/u0/l1", "c--/q8/s0/u0/l1"])
    assert str(table.fit(BatchShape.parse("c--/q3/s0/u0/l1"))) == "c--/q8/s0/u0/l1"


def test_fit_obeys_an_injected_cost() -> None:
    texts = ["cs-/q8/s64/u0/l1", "cs-/q64/s8/u0/l1"]
    shape = BatchShape.parse("cs-/q4/s4/u0/l1")
    by_query = BucketTable.from_strings(texts, cost=lambda bucket: bucket.query_len)
    by_blocks = BucketTable.from_strings(texts, cost=lambda bucket: bucket.num_shared_blocks)
    assert str(by_query.fit(shape)) == texts[0]
    assert str(by_blocks.fit(shape)) == texts[1]


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_an_exponential_table_has_a_bucket_for_every_step_that_a_scheduler_can_plan(
    data: st.DataObject,
) -> None:
    limits = data.draw(limits_strategy)
    table = BucketTable.exponential(limits)
    for _ in range(10):
        shape = data.draw(scheduled_shapes(limits))
        assert limits.reaches(shape)
        bucket = table.fit(shape)
        assert not isinstance(bucket, Miss)
        assert bucket.holds(shape)
        assert limits.largest.holds(shape)


@given(
    limits_strategy,
    st.builds(
        ExponentialRule,
        growth=st.sampled_from([1.1, 1.5, 2.0, 3.7]),
        slack=st.sampled_from([1.0, 1.3, 2.0, 9.0]),
        min_query=st.integers(1, 1000),
        min_blocks=st.integers(1, 1000),
    ),
)
@settings(max_examples=40, deadline=None)
def test_no_bucket_exceeds_a_limit_and_the_largest_of_each_phase_is_one(
    limits: StepLimits, rule: ExponentialRule
) -> None:
    table = BucketTable.exponential(limits, rule)
    for bucket in table:
        assert bucket.query_len <= limits.max_num_batched_tokens
        assert bucket.num_shared_blocks <= (limits.num_blocks if limits.uses_blocks else 0)
        assert bucket.num_unique_blocks <= (limits.num_blocks if limits.uses_blocks else 0)
        assert bucket.num_logits <= limits.max_num_seqs
        most = bucket.num_logits * limits.decode_len
        assert bucket.phase.causal or bucket.num_logits <= bucket.query_len <= most
    assert {limits.largest_of(phase) for phase in limits.reachable_phases} <= set(table)
    assert table.envelope == limits.largest


def test_every_reachable_shape_of_small_limits_has_a_bucket() -> None:
    limits = StepLimits(
        max_num_seqs=3,
        max_num_batched_tokens=5,
        max_model_len=4,
        block_size=2,
        num_blocks=6,
        decode_len=1,
        max_chunk_rows=2,
    )
    table = BucketTable.exponential(limits, ExponentialRule(slack=1.2, min_query=2, min_blocks=2))
    num_reached = 0
    for phase, q, s, u, n in product(Phase.all(), range(1, 8), range(8), range(8), range(6)):
        if (s and not phase.shared) or (u and not phase.unique):
            continue
        shape = BatchShape(phase, q, s, u, n)
        if limits.reaches(shape):
            num_reached += 1
            assert not isinstance(table.fit(shape), Miss)
    assert num_reached > 100


@given(limits_strategy, st.sampled_from([1.2, 2.0]))
@settings(max_examples=30, deadline=None)
def test_each_size_left_out_has_a_bucket_of_its_phase_within_the_slack(
    limits: StepLimits, slack: float
) -> None:
    rule = ExponentialRule(slack=slack)
    table = BucketTable.exponential(limits, rule)
    for phase in limits.reachable_phases:
        for shape in rule.grid(limits, phase):
            costs = [table.cost(b) for b in table if b.phase == phase and b.holds(shape)]
            assert min(costs) <= slack * table.cost(shape)


@pytest.mark.parametrize(
    "limits",
    [
        LIMITS,
        StepLimits(
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            max_model_len=131_072,
            block_size=128,
            num_blocks=4000,
            decode_len=1,
            max_chunk_rows=4,
        ),
        StepLimits(
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_model_len=40_960,
            block_size=128,
            num_blocks=7593,
            decode_len=1,
            max_chunk_rows=1,
        ),
        StepLimits(
            max_num_seqs=4,
            max_num_batched_tokens=8192,
            max_model_len=1 << 20,
            block_size=128,
            num_blocks=16_384,
            decode_len=1,
            max_chunk_rows=1,
        ),
    ],
)
def test_default_tables_stay_below_a_hundred_buckets(limits: StepLimits) -> None:
    assert len(BucketTable.exponential(limits)) < 100


def test_one_request_of_one_token_steps_needs_one_phase_only() -> None:
    table = BucketTable.exponential(
        StepLimits(
            max_num_seqs=1,
            max_num_batched_tokens=1,
            max_model_len=64,
            block_size=16,
            num_blocks=4,
            decode_len=1,
            max_chunk_rows=1,
        )
    )
    assert [str(bucket) for bucket in table] == ["--u/q1/s0/u4/l1"]


def test_a_model_of_streaming_heads_only_has_buckets_without_blocks() -> None:
    limits = StepLimits(
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=10_000,
        block_size=16,
        num_blocks=0,
        uses_blocks=False,
        decode_len=1,
        max_chunk_rows=1,
    )
    table = BucketTable.exponential(limits)
    assert {str(bucket.phase) for bucket in table} == {"c--", "cs-", "c-u", "csu", "--u"}
    assert table.envelope.num_shared_blocks == table.envelope.num_unique_blocks == 0


def test_cost_never_decreases_when_a_dimension_or_a_part_is_added() -> None:
    cost = StepCost(ring_width=320)
    shape = BatchShape.parse("-s-/q8/s4/u0/l4")
    for larger in [
        "cs-/q8/s4/u0/l4",
        "-su/q8/s4/u0/l4",
        "-s-/q9/s4/u0/l4",
        "-s-/q8/s5/u0/l4",
        "-s-/q8/s4/u0/l5",
    ]:
        assert cost(BatchShape.parse(larger)) > cost(shape)


def test_default_cost_equates_a_step_of_long_contexts_with_reading_as_many_bytes_of_weights() -> None:
    cost = StepCost()
    weights_bytes = 2 * 12 * 4096**2 * 32
    slot_bytes = 2 * 2 * (4096 // 4) * 32
    assert cost.slot / cost.step == pytest.approx(slot_bytes / weights_bytes, rel=0.03)


def test_a_table_is_a_sorted_unique_value() -> None:
    texts = ["c--/q8/s0/u0/l1", "--u/q1/s0/u8/l1", "c--/q8/s0/u0/l1"]
    table = BucketTable.from_strings(texts)
    assert [str(bucket) for bucket in table] == ["--u/q1/s0/u8/l1", "c--/q8/s0/u0/l1"]
    assert len(table) == 2
    assert BatchShape.parse(texts[0]) in table
    assert BatchShape.parse("c--/q7/s0/u0/l1") not in table
    assert table == BucketTable.from_strings(reversed(texts))
    assert hash(table) == hash(BucketTable.from_strings(reversed(texts)))


def test_with_buckets_leaves_the_first_table_as_it_was() -> None:
    table = BucketTable.from_strings(["c--/q8/s0/u0/l1"])
    wider = table.with_buckets([BatchShape.parse("c--/q16/s0/u0/l1")])
    assert len(table) == 1
    assert len(wider) == 2
    assert isinstance(table.fit(BatchShape.parse("c--/q9/s0/u0/l1")), Miss)


def test_the_envelope_holds_all_buckets_and_the_largest_is_the_most_expensive() -> None:
    table = BucketTable.from_strings(["c--/q512/s0/u0/l4", "-su/q8/s64/u128/l8"])
    assert str(table.envelope) == "csu/q512/s64/u128/l8"
    assert str(table.largest) == "c--/q512/s0/u0/l4"


def test_an_empty_table_misses_everything_and_has_no_largest_bucket() -> None:
    table = BucketTable(())
    miss = table.fit(BatchShape.parse("c--/q1/s0/u0/l1"))
    assert isinstance(miss, Miss)
    assert str(miss) == "no bucket holds c--/q1/s0/u0/l1; nearest buckets: none, the table is empty"
    with pytest.raises(ValueError, match="at least one bucket"):
        _ = table.largest
    with pytest.raises(ValueError, match="at least one bucket"):
        _ = table.envelope


def test_a_miss_names_the_buckets_that_lack_least_first() -> None:
    table = BucketTable.from_strings(["--u/q4/s0/u4/l4", "--u/q8/s0/u60/l8", "c--/q64/s0/u0/l8"])
    miss = table.fit(BatchShape.parse("--u/q8/s0/u64/l8"))
    assert isinstance(miss, Miss)
    assert str(miss.nearest[0]) == "--u/q8/s0/u60/l8"


def test_a_bad_line_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a shape such as"):
        BucketTable.from_strings(["c--/q8/s0/u0/l1", "c--/q8"])


def test_bad_limits_and_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="expected max_num_seqs >= 1, got 0"):
        StepLimits(
            max_num_seqs=0,
            max_num_batched_tokens=1,
            max_model_len=1,
            block_size=1,
            num_blocks=1,
            decode_len=1,
            max_chunk_rows=1,
        )
    with pytest.raises(ValueError, match="expected num_blocks >= 1"):
        StepLimits(
            max_num_seqs=1,
            max_num_batched_tokens=1,
            max_model_len=1,
            block_size=1,
            num_blocks=0,
            decode_len=1,
            max_chunk_rows=1,
        )
    with pytest.raises(ValueError, match="expected growth > 1"):
        ExponentialRule(growth=1.0)
    with pytest.raises(ValueError, match="slack >= 1"):
        ExponentialRule(slack=0.5)
