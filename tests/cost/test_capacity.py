"""Capacity: exact bytes of memory plans, and the direction in which capacity and speed move."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.cost import (
    GAUDI2,
    GAUDI3,
    SECONDS_PER_GRAPH,
    Capacity,
    Deployment,
    Format,
    ModelSize,
    Serving,
    capacity,
)
from hpu_duo.cost.published import dense_model
from hpu_duo.heads import CountRule, HeadPattern, fewest_promotions
from hpu_duo.kv.plan import MemoryPlan
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
SPARSITIES = st.sampled_from((0.0, 0.25, 0.5, 0.75, 1.0))
FORMATS = st.sampled_from(Format)


def deployments() -> st.SearchStrategy[Deployment]:
    serving = st.builds(
        Serving,
        st.sampled_from((GAUDI2, GAUDI3)),
        block_size=st.sampled_from((16, 128)),
        # Little memory for the cache, so that few enough requests fit to count them.
        device_memory_utilization=st.sampled_from((3e-3, 5e-3, 0.1)),
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
            dtype_bytes=deployment.kv_format.num_bytes,
            block_size=deployment.serving.block_size,
            max_num_seqs=num_rows,
            kv_cache_bytes=deployment.kv_bytes,
        )
    except ValueError:
        assert counted < num_rows
    else:
        assert counted == plan.num_blocks


@given(deployments(), st.integers(1, 40_000), st.integers(0, 40_000))
def test_longer_contexts_never_fit_more_requests(deployment: Deployment, context: int, more: int) -> None:
    assert deployment.count_requests(context + more) <= deployment.count_requests(context)


@given(deployments(), st.integers(1, 200), st.integers(1, 40_000), st.integers(1, 200))
def test_more_requests_give_more_tokens_per_second_and_longer_prompts_take_longer(
    deployment: Deployment, num_requests: int, context: int, more: int
) -> None:
    few = deployment.decode_tokens_per_s(num_requests, context)
    assert deployment.decode_tokens_per_s(num_requests + more, context) >= few * (1 - 1e-12)
    assert deployment.decode_tokens_per_s(num_requests, context + more) <= few * (1 + 1e-12)
    assert deployment.first_token_s(context + more) > deployment.first_token_s(context)


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


def report(sparsity: float = 0.5, kv: Format = Format.BF16, **changes: Any) -> Capacity:
    return capacity(LLAMA_3_8B, Serving(GAUDI3, **changes), sparsity, kv, (8192, 131_072, 1_048_576))


def test_streaming_heads_and_fp8_let_more_requests_run_faster() -> None:
    full, duo, both = report(0.0), report(0.5), report(0.5, Format.FP8)
    for one, two, three in zip(full.points, duo.points, both.points):
        assert one.num_requests <= two.num_requests <= three.num_requests
        assert one.bytes_per_request > two.bytes_per_request > three.bytes_per_request
        assert (one.tokens_per_s_alone or 0) <= (two.tokens_per_s_alone or 0)
    assert full.points[-1].num_requests == 0
    assert full.points[-1].tokens_per_s is None
    assert full.points[-1].first_token_s is None
    assert full.warm_up is None
    assert both.points[-1].num_requests == 2


def test_no_more_requests_run_than_allowed() -> None:
    free, held = report().points[0], report(max_num_seqs=10).points[0]
    assert held.num_running == 10 < held.num_requests == free.num_requests == free.num_running
    assert held.tokens_per_s is not None
    assert free.tokens_per_s is not None
    assert held.tokens_per_s < free.tokens_per_s


def test_warm_up_is_the_published_range_for_each_graph() -> None:
    warm_up = report().warm_up
    assert warm_up is not None
    assert (warm_up.num_graphs, warm_up.num_layer_kinds, warm_up.is_bound) == (64, 1, True)
    assert (warm_up.low_s, warm_up.high_s) == tuple(warm_up.num_graphs * each for each in SECONDS_PER_GRAPH)


PATTERN = HeadPattern.random(32, 8, seed=0, sink=64, recent=256)


def test_a_pattern_decides_heads_kinds_of_layers_and_recipes() -> None:
    free, few = report(pattern=PATTERN, max_layer_kinds=None), report(pattern=PATTERN)
    needed = [kept for kept, _ in PATTERN.binarise(sparsity=0.5).head_counts]
    assert free.warm_up is not None
    assert few.warm_up is not None
    assert free.warm_up.num_layer_kinds == len(set(needed)) > 4
    assert few.warm_up.num_layer_kinds == 4
    assert few.warm_up.num_recipes == 4 * few.warm_up.num_graphs
    assert few.warm_up.high_s < free.warm_up.high_s
    assert few.num_promoted == sum(fewest_promotions(needed, CountRule(4))) - 128 > free.num_promoted == 0
    for one, more in zip(few.points, free.points):
        assert one.bytes_per_request > more.bytes_per_request
    assert f"less {few.num_promoted} promoted ones" in few.describe()


@given(models(), SPARSITIES, st.integers(1, 3000))
def test_a_deployment_has_no_more_kinds_than_its_layers_need(
    model: ModelSize, sparsity: float, max_len: int
) -> None:
    free = Deployment(model, Serving(GAUDI3, max_layer_kinds=None), sparsity, Format.BF16, max_len)
    few = Deployment(model, Serving(GAUDI3, max_layer_kinds=1), sparsity, Format.BF16, max_len)
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


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ValueError, match="contexts of 1 token or more"):
        capacity(tiny(), Serving(GAUDI2), 0.0, Format.BF16, ())
    with pytest.raises(ValueError, match="contexts of 1 token or more"):
        capacity(tiny(), Serving(GAUDI2), 0.0, Format.BF16, (5, 0))
    with pytest.raises(ValueError, match="1 to 100000 tokens, the positions of tiny, got 100001"):
        capacity(tiny(), Serving(GAUDI2), 0.0, Format.BF16, (5, 100_001))
    with pytest.raises(ValueError, match=r"sparsity in \[0, 1\], got -0.1"):
        capacity(tiny(), Serving(GAUDI2), -0.1, Format.BF16, (5,))
    with pytest.raises(ValueError, match=r"bf16 weights of tiny take .* Gaudi 2 have 94.6 GiB"):
        capacity(tiny(matrix_params=10**11), Serving(GAUDI2), 0.0, Format.BF16, (5,))
    with pytest.raises(ValueError, match="divides 2 KV heads, got 4"):
        capacity(tiny(), Serving(GAUDI2, num_devices=4), 0.0, Format.BF16, (5,))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_devices": 9}, "1 to 8 Gaudi 2 devices, got 9"),
        ({"block_size": 0}, "block_size >= 1"),
        ({"device_memory_utilization": 0.0}, "device_memory_utilization in"),
        ({"graph_memory": 1.0}, "graph_memory in"),
    ],
)
def test_impossible_serving_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Serving(GAUDI2, **changes)
