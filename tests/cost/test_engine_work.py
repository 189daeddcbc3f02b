"""The work of the engine's steps: ranks that share a layer, and what is compiled of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bias_builders import Window
from graphs import BatchShape
from hpu_duo.kv.plan import LayerKV, head_groups
from hpu_duo.planning import GAUDI3, Deployment, Format, Serving, Step, busiest_rank, step_cost
from tests.cost.test_capacity import LLAMA_3_8B, SPARSITIES


def test_a_layer_waits_for_the_rank_with_most_retrieval_heads() -> None:
    """Eight ranks of one head each: wherever a layer has a retrieval head, its rank reads the whole text."""

    def decode(sparsity: float, num_devices: int) -> tuple[float, float]:
        serving = Serving(GAUDI3, num_devices=num_devices)
        deployment = Deployment(LLAMA_3_8B, serving, sparsity, Format.BF16, 131_072)
        step = Step(16, 131_071)
        work = deployment.engine_work.of(deployment.shape_of(step))
        return work.kv_bytes, deployment.step_seconds(step).value

    for num_devices in (1, 2, 4):
        full, half = decode(0.0, num_devices), decode(0.5, num_devices)
        assert half[0] == full[0] / 2
        assert half[1] < full[1]
    # Every layer has four heads that retrieve, so four of eight ranks have nothing else.
    assert decode(0.5, 8)[0] == decode(0.0, 8)[0]
    assert decode(0.5, 8)[1] >= decode(0.0, 8)[1]
    assert decode(1.0, 8)[1] < decode(0.0, 8)[1] / 2


@given(st.integers(0, 16), st.integers(0, 16), st.sampled_from((1, 2, 4, 8)), st.integers(1, 100))
def test_the_busiest_rank_has_its_share_of_heads_and_as_many_that_retrieve_as_any(
    num_retrieval: int, num_streaming: int, num_devices: int, recent: int
) -> None:
    num_heads = num_retrieval + num_streaming
    if not num_heads or num_heads % num_devices:
        return
    kv = LayerKV(head_groups(num_retrieval, num_streaming, Window(0, recent)), 8)
    rank = busiest_rank(kv, num_devices)
    assert rank.num_heads == num_heads // num_devices
    placed = [0] * num_devices
    for head in range(num_retrieval):
        placed[head % num_devices] += 1
    assert sum(group.num_heads for group in rank.groups if group.kind.reach is None) == max(placed)


@given(st.sampled_from(("reference", "hpu")), SPARSITIES, st.integers(1, 7))
def test_what_is_compiled_of_a_layer_does_not_grow_with_the_context_and_what_is_launched_does(
    attention: str, sparsity: float, doublings: int
) -> None:
    deployment = Deployment(LLAMA_3_8B, Serving(GAUDI3, attention=attention), sparsity, Format.BF16, 262_144)
    work, shape = deployment.engine_work, "csu/q2048/s{n}/u{n}/l16"
    short, long = (BatchShape.parse(shape.format(n=size)) for size in (64, 64 << doublings))
    assert work.traced_launches(long) <= work.traced_launches(short) + 100
    assert work.traced_launches(long) < 600
    assert (work.of(long).num_launches > work.of(short).num_launches) is (sparsity < 1.0)


@given(st.sampled_from(("reference", "hpu")), st.integers(1, 64), st.integers(0, 4096))
def test_buckets_are_ranked_by_about_as_many_operators_as_are_predicted(
    attention: str, num_rows: int, num_blocks: int
) -> None:
    deployment = Deployment(LLAMA_3_8B, Serving(GAUDI3, attention=attention), 0.0, Format.BF16, 262_144)
    ranked = step_cost(deployment).launches
    for text in (f"--u/q{num_rows}/s0/u{num_blocks}/l{num_rows}", f"cs-/q2048/s{num_blocks + 1}/u0/l1"):
        bucket = BatchShape.parse(text)
        counted = deployment.engine_work.of(bucket).num_launches / len(LLAMA_3_8B.layers)
        sizes = bucket.query_len, bucket.num_shared_blocks, bucket.num_unique_blocks
        assert 1 / 4 < ranked.at(bucket.phase, *sizes) / counted < 4


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="divide 3 KV heads, got 2"):
        busiest_rank(LayerKV(head_groups(3, 0, None), 8), 2)
