"""Estimates: from measurements where there are some, from sizes and stated figures elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from graphs import BatchShape, BucketTable
from graphs.manifest import GraphRecord, Manifest
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.startup.tables import StepSizes
from hpu_duo.startup.warm_up import plan_within
from hpu_duo.startup.warm_up_estimate import PRIORS, GraphCosts, WarmUpBudget, estimate_of
from kernels_ref import Blocks
from kernels_ref.groups import HeadSizes
from tests.engine.tiny import PATTERN, Tiny
from tests.modeling.families import save_random
from tests.warmup.live_bytes import LiveBytes

SIZES = StepSizes(
    hidden_size=4096,
    intermediate_size=14336,
    vocab_size=128_256,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    groups=frozenset({(Blocks(), HeadSizes(8, 4, 128, 2))}),
    block_size=128,
    dtype_bytes=2,
)
"""Llama-3.1-8B in bfloat16."""

BUCKETS = tuple(map(BatchShape.parse, ["csu/q16/s8/u48/l4", "--u/q4/s0/u48/l4", "--u/q1/s0/u4/l1"]))
CODE = GraphCosts(PRIORS["compile"], 2, SIZES)


DUO = HeadPattern(
    np.zeros((1, 4), np.float32), sink=32, recent=96, retrieval=np.array([[True, False, True, False]])
)


@pytest.fixture(scope="module", params=[None, DUO], ids=["full", "duo"])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HPUDuoModel:
    """One wide layer, so that intermediates are large against what Python and torch keep around them."""
    path = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 8, "num_key_value_heads": 4}
    save_random(
        LlamaConfig(num_hidden_layers=1, vocab_size=2000, max_position_embeddings=4096, **sizes), path
    )
    return HPUDuoModel.from_pretrained(
        path,
        pattern=request.param,
        attention="reference",
        block_size=64,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        num_blocks=400,
    )


@pytest.mark.parametrize(
    "shape",
    [
        "c--/q256/s0/u0/l1",
        "cs-/q256/s60/u0/l1",
        "csu/q128/s60/u100/l16",
        "c-u/q64/s0/u400/l16",
        "--u/q16/s0/u400/l16",
        "-su/q16/s200/u200/l16",
        "--u/q1/s0/u8/l1",
    ],
)
def test_the_working_memory_of_a_step_is_estimated_within_a_factor_of_two_and_a_half(
    wide: HPUDuoModel, shape: str
) -> None:
    bucket = BatchShape.parse(shape)
    with LiveBytes() as live:
        wide.engine.runner.warmup.touch(bucket)
    estimate = GraphCosts.of(wide.engine).sizes.transient_bytes(bucket)
    assert live.peak <= estimate * 1.1, (live.peak, estimate)
    assert estimate <= live.peak * 2.5, (live.peak, estimate)


def test_an_estimate_grows_with_the_bucket() -> None:
    small, large = BatchShape.parse("csu/q128/s8/u64/l8"), BatchShape.parse("csu/q2048/s64/u512/l64")
    assert SIZES.transient_bytes(small) < SIZES.transient_bytes(large)
    assert SIZES.output_bytes(large) == 64 * 128_256 * 2


def test_graphs_that_share_a_pool_keep_results_and_code_only() -> None:
    bucket = BUCKETS[0]
    cuda, hpu = GraphCosts(PRIORS["cuda"], 1, SIZES), GraphCosts(PRIORS["hpu-graph"], 1, SIZES)
    assert cuda.kept_bytes(bucket) == PRIORS["cuda"].code_bytes + SIZES.output_bytes(bucket)
    assert hpu.kept_bytes(bucket) == SIZES.output_bytes(bucket) + SIZES.transient_bytes(bucket)


def test_a_bucket_that_is_too_long_to_be_captured_keeps_nothing() -> None:
    costs = GraphCosts(PRIORS["hpu-graph"], 1, SIZES, max_captured_tokens=8)
    assert costs.kept_bytes(BUCKETS[0]) == 0
    assert costs.kept_bytes(BUCKETS[1]) > 0


def test_without_measurements_the_figures_are_those_of_the_backend_for_each_kind_of_layer() -> None:
    prior = PRIORS["compile"]
    estimate = estimate_of(BUCKETS, CODE, num_routes=10)
    assert estimate.low_s == pytest.approx(3 * 2 * prior.low_s + 0.2)
    assert estimate.high_s == pytest.approx(3 * 2 * prior.high_s + 2.5)
    assert estimate.source == prior.source
    assert estimate.num_measured == 0
    assert estimate.peak_bytes == estimate.kept_bytes + SIZES.transient_bytes(BUCKETS[0])


def test_graphs_of_an_hpu_take_longer_the_more_operators_they_have_and_are_traced() -> None:
    prior = PRIORS["hpu-compile"]
    base = prior.num_operators
    assert base is not None
    counts = dict(zip(BUCKETS, (3 * base, base, base / 2)))
    estimate = estimate_of(BUCKETS, GraphCosts(prior, 2, SIZES, operators=counts.__getitem__))
    for graph, scale in zip(estimate.graphs, (3.0, 1.0, 1.0)):
        traced = prior.trace_s * counts[graph.shape]
        assert graph.low_s == pytest.approx(2 * (prior.low_s * scale + traced))
        assert graph.high_s == pytest.approx(2 * (prior.high_s * scale + traced))
        assert graph.trace_s == pytest.approx(2 * traced)
    assert prior.trace_s > 0
    assert "unknown until a Gaudi has run" in estimate.unknown
    assert estimate_of(BUCKETS, CODE).unknown == ""


def test_what_was_measured_is_expected_again_and_stands_for_the_others() -> None:
    records = (GraphRecord(BUCKETS[0], 3.0, 100), GraphRecord(BUCKETS[1], 1.0, -5), GraphRecord(BUCKETS[2]))
    estimate = estimate_of(BUCKETS, CODE, earlier=Manifest({}, {}, records))
    first, second, third = estimate.graphs
    assert (first.low_s, first.high_s, first.num_bytes) == (3.0, 3.0, 100)
    assert (second.high_s, second.num_bytes) == (1.0, 0)
    assert (third.low_s, third.high_s, third.is_measured) == (2.0, 3.0, False)
    assert third.num_bytes == CODE.kept_bytes(BUCKETS[2])
    assert estimate.num_measured == 2


@pytest.mark.parametrize("name", ["max_graphs", "max_seconds", "max_gib"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), "many", True])
def test_a_bound_that_is_no_positive_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"expected {name} to be a number above 0"):
        WarmUpBudget(**{name: value})  # type: ignore[arg-type]


def test_every_bound_that_is_exceeded_is_named_at_once() -> None:
    estimate = estimate_of(BUCKETS, CODE)
    WarmUpBudget(3, estimate.high_s, estimate.peak_bytes / (1 << 30)).check(estimate)
    with pytest.raises(ValueError, match="does not fit its budget") as raised:
        WarmUpBudget(2, 10.0, 0.001).check(estimate)
    message = str(raised.value)
    assert "3 graphs, expected at most 2" in message
    assert "12 to 120 s, expected at most 10 s" in message
    assert "GiB, expected at most 0.001 GiB" in message
    assert "Nothing has been captured" in message


def test_a_planned_table_fits_the_budget_it_was_planned_for(tiny: Tiny) -> None:
    served = tiny.load(pattern=PATTERN)
    table = plan_within(served.engine, 12, WarmUpBudget(max_graphs=8, max_seconds=2.6, max_gib=0.01))
    assert 1 <= len(table) <= 5
    served.warmup(table=table, budget=WarmUpBudget(8, 2.6, 0.01), dry_run=True)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (WarmUpBudget(max_seconds=0.1), r"0\.1 s does not hold the smallest table: one graph takes 0\.5 s"),
        (WarmUpBudget(max_gib=1e-6), "GiB does not hold the smallest table: the largest step takes"),
    ],
)
def test_a_budget_that_does_not_hold_the_smallest_table_is_refused(
    tiny: Tiny, budget: WarmUpBudget, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_within(tiny.load().engine, 4, budget)


def test_a_table_is_planned_for_what_was_recorded(tiny: Tiny, tmp_path: Path) -> None:
    recording = tmp_path / "shapes.jsonl"
    recording.write_text('{"shape": "--u/q3/s0/u17/l3", "count": 1000}\n')
    table = plan_within(tiny.load().engine, 6, recordings=[recording])
    bucket = table.fit(BatchShape.parse("--u/q3/s0/u17/l3"))
    assert isinstance(bucket, BatchShape)
    default = BucketTable((table.envelope,), table.cost)
    assert table.cost(bucket) < default.cost(default.largest)
