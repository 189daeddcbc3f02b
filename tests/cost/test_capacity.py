"""Capacity: exact bytes of memory plans, and the direction in which capacity and speed move."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.config.limits import CARD_LIMITS
from hpu_duo.heads import CountRule, HeadPattern, fewest_promotions
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.planning import (
    GAUDI2,
    GAUDI3,
    PUBLISHED_LAYER_LAUNCHES,
    SECONDS_PER_GRAPH,
    AttentionSize,
    Capacity,
    Deployment,
    Format,
    ModelSize,
    Serving,
    Step,
    WarmUp,
    capacity,
    graph_scale,
)
from hpu_duo.planning import TRACE_S_PER_OPERATOR as PER_NODE
from hpu_duo.planning.engine_work import BucketGraphs
from hpu_duo.planning.fit import dense_model
from kernels_ref import PLAIN, KVFormat, Rings
from kernels_ref.formats import format_of
from tests.cost.sizes import models, tiny

LLAMA_2_7B = dense_model(
    "Llama-2-7B",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_heads=32,
    num_kv_heads=32,
    vocab_size=32000,
    max_positions=131_072,
)
LLAMA_3_8B = dense_model(
    "Llama-3-8B",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=128256,
    max_positions=1_048_576,
)
DEEPSEEK_V3 = replace(
    dense_model(
        "DeepSeek-V3",
        num_layers=61,
        hidden_size=7168,
        intermediate_size=18432,
        num_heads=128,
        num_kv_heads=128,
        vocab_size=129280,
        max_positions=163_840,
    ),
    layers=(AttentionSize(128, 128, 192, value_head_dim=128, latent=(512, 64)),) * 61,
)
"""With the attention of its config.json; the weights are those of a dense model."""
SPARSITIES = st.sampled_from((0.0, 0.25, 0.5, 0.75, 1.0))
FORMATS = st.sampled_from([PLAIN, format_of("fp8"), format_of("k8v4")])


def deployments() -> st.SearchStrategy[Deployment]:
    serving = st.builds(
        Serving,
        st.sampled_from((GAUDI2, GAUDI3)),
        block_size=st.sampled_from((16, 128)),
        # Little memory for the cache, so that few enough requests fit to count them.
        device_memory_utilization=st.sampled_from((3e-3, 5e-3, 0.1)),
        enable_prefix_caching=st.booleans(),
        max_num_seqs=st.sampled_from((1, 20, 256)),
    )
    return st.builds(Deployment, models(), serving, SPARSITIES, FORMATS, max_len=st.integers(100, 90_000))


@given(deployments(), st.integers(1, 90_000))
def test_the_requests_that_fit_are_the_most_that_a_memory_plan_holds(
    deployment: Deployment, context: int
) -> None:
    fits = deployment.count_requests(context)
    blocks = -(-context // deployment.serving.block_size) if deployment.plan(1, 1).uses_blocks else 0

    def total_bytes(num_requests: int) -> int:
        return deployment.plan(num_requests, num_requests * blocks).total_bytes

    if fits:
        assert total_bytes(fits) <= deployment.kv_bytes
    assert total_bytes(fits + 1) > deployment.kv_bytes


@given(deployments(), st.integers(1, 50))
def test_the_blocks_that_fit_are_those_of_a_plan_from_the_same_budget(
    deployment: Deployment, num_rows: int
) -> None:
    counted = deployment.count_blocks(num_rows)
    try:
        plan = MemoryPlan.from_budget(
            deployment.kv_layers,
            dtype_bytes=2,
            block_size=deployment.serving.block_size,
            max_num_seqs=num_rows,
            kv_cache_bytes=deployment.kv_bytes,
            num_snapshots=deployment.count_snapshots(num_rows),
        )
    except ValueError:
        assert counted < num_rows
    else:
        assert counted == plan.num_blocks


@given(deployments(), st.integers(1, 40_000), st.integers(0, 40_000))
def test_longer_contexts_never_fit_more_requests(deployment: Deployment, context: int, more: int) -> None:
    assert deployment.count_requests(context + more) <= deployment.count_requests(context)


@given(deployments(), st.integers(1, 40_000), st.integers(1, 200))
def test_longer_contexts_never_decode_faster_and_longer_prompts_take_longer(
    deployment: Deployment, context: int, more: int
) -> None:
    few, many = (deployment.decode_tokens_per_s(3, size) for size in (context + 1, context + 1 + more))
    assert many.value <= few.value * (1 + 1e-12)
    assert deployment.first_token_s(context + more).value > deployment.first_token_s(context).value


@given(deployments(), st.integers(1, 400), st.integers(1, 40_000))
def test_a_prediction_lies_in_its_range_and_the_range_is_as_wide_as_the_error(
    deployment: Deployment, num_requests: int, context: int
) -> None:
    for found in (
        deployment.first_token_s(context),
        deployment.decode_tokens_per_s(num_requests, context),
    ):
        assert found.low <= found.value <= found.high
        assert found.high / found.low >= deployment.error_factor**2 * (1 - 1e-12)


@given(deployments(), st.integers(1, 200), st.integers(2, 4000))
def test_the_shape_of_a_decode_has_its_whole_blocks_and_that_of_a_chunk_all_of_them(
    deployment: Deployment, num_rows: int, context: int
) -> None:
    size, uses_blocks = deployment.serving.block_size, deployment.plan(1, 1).uses_blocks
    decode, chunk = (deployment.shape_of(Step(num_rows, context, new)) for new in (1, 7))
    whole = sum(len(range(size, context + 2, size)) for _ in range(num_rows))
    held = sum(len(range(0, context, size)) for _ in range(num_rows))
    assert str(decode) == f"--u/q{num_rows}/s0/u{whole * uses_blocks}/l{num_rows}"
    assert str(chunk) == f"cs-/q{7 * num_rows}/s{held * uses_blocks}/u0/l{num_rows}"


def test_a_published_start_up_log_is_reproduced() -> None:
    """23.75 GiB hold 1519 blocks of 128, and a spare one: documentation of vllm-gaudi, Llama 8B, Gaudi 2."""
    plan = MemoryPlan.from_budget(
        LLAMA_3_8B.kv_layers(0.0, 0, 1, 4096),
        dtype_bytes=2,
        block_size=128,
        max_num_seqs=1,
        kv_cache_bytes=round(23.75 * 2**30),
    )
    assert plan.block_bytes == 16 * 2**20
    assert plan.num_blocks == 1519


@pytest.mark.parametrize(
    ("model", "context", "sparsity", "measured"),
    [(LLAMA_2_7B, 100_000, 0.75, 2.38), (LLAMA_3_8B, 320_000, 0.5, 1.53)],
)
def test_memory_falls_about_as_far_as_duoattention_measured(
    model: ModelSize, context: int, sparsity: float, measured: float
) -> None:
    """Weights and cache of one request; the paper measured these while prefilling, so with activations."""

    def total_bytes(share: float) -> int:
        layers = model.kv_layers(share, 64, 256, context)
        one = MemoryPlan(layers, dtype_bytes=2, block_size=128, max_num_seqs=1, num_blocks=1)
        return model.weight_bytes(Format.BF16) + one.bytes_per_request(context)

    assert measured <= total_bytes(0.0) / total_bytes(sparsity) <= 1.05 * measured


def report(sparsity: float = 0.5, kv: KVFormat = PLAIN, **changes: Any) -> Capacity:
    return capacity(LLAMA_3_8B, Serving(GAUDI3, **changes), sparsity, kv, (8192, 131_072, 1_048_576))


def test_streaming_heads_and_fp8_let_more_requests_run() -> None:
    full, duo, both = report(0.0), report(0.5), report(0.5, format_of("fp8"))
    for one, two, three in zip(full.points, duo.points, both.points):
        assert one.num_requests <= two.num_requests <= three.num_requests
        assert one.bytes_per_request > two.bytes_per_request > three.bytes_per_request
        if one.tokens_per_s and two.tokens_per_s and three.tokens_per_s:
            assert one.tokens_per_s < two.tokens_per_s < three.tokens_per_s
    assert full.points[-1].num_requests == 0
    assert full.points[-1].tokens_per_s is None
    assert full.points[-1].first_token_s is None
    assert full.points[-1].first_token_s_range is None
    assert full.warm_up is None
    assert both.points[-1].num_requests == 2


def test_no_more_requests_run_than_allowed() -> None:
    free, held = (
        report(max_num_seqs=most, enable_prefix_caching=False).points[0]
        for most in (CARD_LIMITS.max_num_seqs, 10)
    )
    assert held.num_running == 10 < held.num_requests == free.num_requests == free.num_running
    assert held.tokens_per_s is not None
    assert free.tokens_per_s is not None
    assert held.tokens_per_s < free.tokens_per_s


@given(deployments(), st.integers(1, 300))
def test_snapshots_take_an_eighth_of_the_rest_at_most_but_for_the_first(
    deployment: Deployment, num_rows: int
) -> None:
    num = deployment.count_snapshots(num_rows)
    if not (deployment.serving.enable_prefix_caching and deployment.plan(1, 1).uses_rows):
        assert num == 0
    else:
        assert 1 <= num <= min(num_rows, deployment.serving.max_num_seqs)
        taken = num * deployment.plan(1, 1).row_bytes
        assert num == 1 or 8 * taken <= deployment.kv_bytes - taken


def test_warm_up_is_bounded_by_tables_of_the_smallest_and_of_the_largest_graphs() -> None:
    warm_up = report().warm_up
    assert warm_up is not None
    assert (warm_up.num_graphs, warm_up.num_layer_kinds, warm_up.is_bound) == (64, 1, True)
    fewest, most = warm_up.operators
    assert 90 < fewest < most
    low, high = SECONDS_PER_GRAPH
    assert warm_up.trace_s == pytest.approx((64 * fewest * PER_NODE, 64 * most * PER_NODE), rel=0.01)
    assert warm_up.low_s == pytest.approx(64 * low * graph_scale(fewest) + warm_up.trace_s[0], rel=0.01)
    assert warm_up.high_s == pytest.approx(64 * high * graph_scale(most) + warm_up.trace_s[1], rel=0.01)


def test_graphs_with_more_operators_take_longer_to_warm_up() -> None:
    few, many = (
        WarmUp.of([BucketGraphs(4, 100), BucketGraphs(9, size)], num_layer_kinds=3) for size in (120, 1200)
    )
    assert (few.recipes, few.operators, many.operators) == ((13, 13), (100, 120), (100, 1200))
    assert many.low_s - few.low_s == pytest.approx(
        3 * (SECONDS_PER_GRAPH[0] * (1200 - 120) / PUBLISHED_LAYER_LAUNCHES + 1080 * PER_NODE)
    )
    assert not many.is_bound
    with pytest.raises(ValueError, match="a bucket to warm up, got none"):
        WarmUp.of([], 1)


PATTERN = HeadPattern.random(32, 8, seed=0, sink=64, recent=256)


def test_a_pattern_decides_heads_kinds_of_layers_and_recipes() -> None:
    free, few = report(pattern=PATTERN, max_layer_kinds=None), report(pattern=PATTERN)
    needed = [kept for kept, _ in PATTERN.binarise(sparsity=0.5).head_counts]
    assert free.warm_up is not None
    assert few.warm_up is not None
    assert free.warm_up.num_layer_kinds == len(set(needed)) > 4
    assert few.warm_up.num_layer_kinds == 4
    fewest, most = few.warm_up.recipes
    # A region that prepares each step, and a layer of each kind; more where loops are cut out.
    assert fewest == (1 + 4) * few.warm_up.num_graphs < most
    assert all(less < more for less, more in zip(few.warm_up.recipes, free.warm_up.recipes))
    assert few.warm_up.high_s < free.warm_up.high_s
    assert few.num_promoted == sum(fewest_promotions(needed, CountRule(4))) - 128 > free.num_promoted == 0
    for one, more in zip(few.points, free.points):
        assert one.bytes_per_request > more.bytes_per_request
    assert f"less {few.num_promoted} promoted ones" in few.describe()


@given(models(), SPARSITIES, st.integers(1, 3000))
def test_a_deployment_has_no_more_kinds_than_its_layers_need(
    model: ModelSize, sparsity: float, max_len: int
) -> None:
    free = Deployment(model, Serving(GAUDI3, max_layer_kinds=None), sparsity, PLAIN, max_len)
    few = Deployment(model, Serving(GAUDI3, max_layer_kinds=1), sparsity, PLAIN, max_len)
    assert few.num_layer_kinds == len({(layer, layer.has_window(max_len)) for layer in model.layers})
    assert few.num_layer_kinds <= free.num_layer_kinds
    assert few.num_promoted >= free.num_promoted == 0


def test_a_pattern_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="32 layers x 8 KV heads, got 2 x 8"):
        report(pattern=HeadPattern.random(2, 8, seed=0))


def test_without_retrieval_heads_length_costs_nothing() -> None:
    points = report(1.0).points
    assert len({point.num_requests for point in points}) == 1
    assert len({point.bytes_per_request for point in points}) == 1
    assert report(1.0).warm_up is not None


def test_devices_add_their_memory_and_share_the_work() -> None:
    one, four = report(), report(num_devices=4)
    assert four.points[0].num_requests > 4 * one.points[0].num_requests
    assert (four.points[0].first_token_s or 1e9) < (one.points[0].first_token_s or 0)


def test_what_the_engine_cannot_run_yet_is_named() -> None:
    assert report().not_served == ()
    assert report(kv=format_of("fp8")).not_served == ()
    assert report(num_devices=4, weights=Format.INT8).not_served == ("int8 weights",)
    assert report(num_devices=4, weights=Format.FP8).not_served == ()


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ValueError, match="contexts of 1 token or more"):
        capacity(tiny(), Serving(GAUDI2), 0.0, PLAIN, ())
    with pytest.raises(ValueError, match="contexts of 1 token or more"):
        capacity(tiny(), Serving(GAUDI2), 0.0, PLAIN, (5, 0))
    with pytest.raises(ValueError, match="1 to 100000 tokens, the positions of tiny, got 100001"):
        capacity(tiny(), Serving(GAUDI2), 0.0, PLAIN, (5, 100_001))
    with pytest.raises(ValueError, match=r"sparsity in \[0, 1\], got -0.1"):
        capacity(tiny(), Serving(GAUDI2), -0.1, PLAIN, (5,))
    with pytest.raises(ValueError, match=r"bf16 weights of tiny take .* Gaudi 2 have 94.6 GiB"):
        capacity(tiny(matrix_params=10**11), Serving(GAUDI2), 0.0, PLAIN, (5,))
    with pytest.raises(ValueError, match="divides 2 KV heads, got 4"):
        capacity(tiny(), Serving(GAUDI2, num_devices=4), 0.0, PLAIN, (5,))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_devices": 9}, "1 to 8 Gaudi 2 devices, got 9"),
        ({"block_size": 0}, "block_size >= 1"),
        ({"device_memory_utilization": 0.0}, "device_memory_utilization in"),
        ({"graph_memory": 1.0}, "graph_memory in"),
        ({"attention": "sdpa"}, "attention that an HPU runs, reference or hpu, got 'sdpa'"),
    ],
)
def test_impossible_serving_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Serving(GAUDI2, **changes)


@given(models(), SPARSITIES, st.integers(1, 9), st.booleans())
def test_rings_are_priced_with_their_slack(
    model: ModelSize, sparsity: float, decode_len: int, caches_prefixes: bool
) -> None:
    """Cached prefixes need none."""
    sizes = {"decode_len": decode_len, "enable_prefix_caching": caches_prefixes}
    cold = {"enable_prefix_caching": False, "attention": "reference"}
    serving = Serving(GAUDI3, sink=4, recent=16, block_size=32, **cold)
    plain, with_slack = (
        Deployment(model, each, sparsity, PLAIN, 4096).plan(3, 5)
        for each in (serving, replace(serving, **sizes))
    )
    slots = decode_len - 1
    heads = sum(
        group.num_heads * layer.elements_per_head
        for layer in plain.layers
        for group in layer.groups
        if isinstance(group.kind, Rings)
    )
    assert with_slack.row_bytes - plain.row_bytes == slots * heads * 2
    assert with_slack.block_bytes == plain.block_bytes
    assert replace(with_slack.without_slack, num_snapshots=0) == plain


def test_what_graphs_keep_beyond_their_share_is_said() -> None:
    deployment = Deployment(LLAMA_3_8B, Serving(GAUDI3), 0.0, PLAIN, 131_072)
    small, large = (deployment.graph_memory(9, num << 30, 1 << 30) for num in (1, 60))
    assert small.reserved_bytes == large.reserved_bytes
    assert small.kept_bytes < small.reserved_bytes < large.kept_bytes
    # A block of 128 tokens has 16 MiB in 32 layers with eight heads of 128 in bfloat16.
    assert (small.kept_blocks, large.kept_blocks, large.fused_blocks) == (64, 60 * 64, 64)
    assert small.describe().endswith("GiB are reserved.")
    assert "up to 50.1 GiB too few" in large.describe()
    shared = Deployment(LLAMA_3_8B, Serving(GAUDI3, 8), 0.0, PLAIN, 131_072)
    assert shared.graph_memory(9, 1 << 30, 0).kept_blocks == 8 * 64


def test_each_device_stores_latents_of_all_heads_and_decodes_read_them_once() -> None:
    serving = Serving(GAUDI3, num_devices=8, retrieval_parallel="heads")
    plain = replace(DEEPSEEK_V3, layers=tuple(replace(layer, latent=None) for layer in DEEPSEEK_V3.layers))
    stored, expanded = (Deployment(size, serving, 0.0, PLAIN, 16_384) for size in (DEEPSEEK_V3, plain))
    assert capacity(DEEPSEEK_V3, serving, 0.0, PLAIN, [16_384]).latent_ratio == pytest.approx(71.1, abs=0.02)
    assert stored.plan(1, 1).bytes_per_request(16_384) == 16_384 * 61 * 576 * 2
    # One head of a Gaudi's 16 in a store of 71.1 / 8 times fewer bytes for each device.
    num_requests = [each.count_requests(16_384) for each in (stored, expanded)]
    assert num_requests[0] / num_requests[1] == pytest.approx(71.1 / 8, rel=0.15)
    decode, other = (
        each.engine_work.of(each.shape_of(Step(8, 16_383))).kv_bytes for each in (stored, expanded)
    )
    assert 8 < other / decode < 9


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_latents_by_context_are_stored_and_read_once_and_rings_on_each_device(sparsity: float) -> None:
    by_heads, by_context = (
        Deployment(
            DEEPSEEK_V3, Serving(GAUDI3, num_devices=8, retrieval_parallel=way), sparsity, PLAIN, 16_384
        )
        for way in ("heads", "context")
    )
    ring_bytes = by_heads.plan(1, 1).row_bytes
    assert (ring_bytes > 0) == (sparsity > 0)
    assert by_context.plan(1, 1).row_bytes == 8 * ring_bytes
    # By heads every device has what one plan holds.
    assert by_context.plan(1, 1).block_bytes == 8 * by_heads.plan(1, 1).block_bytes, "of 8 times the tokens"
    assert by_context.kv_bytes // 8 == by_heads.kv_bytes
    read = [each.engine_work.of(each.shape_of(Step(8, 16_383))).kv_bytes for each in (by_heads, by_context)]
    if not sparsity:
        num_requests = [each.count_requests(16_384) for each in (by_heads, by_context)]
        assert num_requests[1] / num_requests[0] == pytest.approx(8, rel=0.02)
        assert read[0] / read[1] == pytest.approx(8, rel=0.02)


def test_latents_of_long_texts_are_shared_by_context() -> None:
    """Each device reads a part of them; of short texts, exchanges take longer than reading all."""
    serving = Serving(GAUDI3, num_devices=8, retrieval_parallel="auto")
    chosen = [
        Deployment(DEEPSEEK_V3, serving, 0.0, PLAIN, length).serving.retrieval_parallel
        for length in (4_096, 131_072)
    ]
    assert chosen == ["heads", "context"]
