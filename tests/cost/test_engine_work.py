"""The work of the engine's steps: ranks that share a layer, and what is compiled of it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bias_builders import Window
from graphs import BatchShape
from hpu_duo.kv.plan import LayerKV, head_groups
from hpu_duo.planning import (
    FITTED,
    GAUDI2,
    GAUDI3,
    Deployment,
    Hardware,
    Serving,
    Step,
    busiest_rank,
    predict_seconds,
)
from kernels_ref import PLAIN
from kernels_ref.chunks import DEFAULT_BOUNDS, MOST_INLINE
from tests.cost.test_capacity import LLAMA_3_8B, SPARSITIES


def test_a_layer_waits_for_the_rank_with_most_retrieval_heads() -> None:
    """Eight ranks of one head each: wherever a layer has a retrieval head, its rank reads the whole text."""

    def decode(sparsity: float, num_devices: int) -> tuple[float, float]:
        serving = Serving(GAUDI3, num_devices=num_devices, retrieval_parallel="heads")
        deployment = Deployment(LLAMA_3_8B, serving, sparsity, PLAIN, 131_072)
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
    deployment = Deployment(LLAMA_3_8B, Serving(GAUDI3, attention=attention), sparsity, PLAIN, 262_144)
    work, shape = deployment.engine_work, "csu/q2048/s{n}/u{n}/l16"
    short, long = (BatchShape.parse(shape.format(n=size)) for size in (128, 128 << doublings))
    # The body of the loop over shared blocks reads up to four chunks.
    assert work.traced_launches(long) <= work.traced_launches(short) + 150
    assert work.traced_launches(long) < 600
    assert (work.of(long).num_launches > work.of(short).num_launches) is (sparsity < 1.0)


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="divide 3 KV heads, got 2"):
        busiest_rank(LayerKV(head_groups(3, 0, None), 8), 2)


@pytest.mark.parametrize("hardware", [GAUDI2, GAUDI3], ids=lambda each: each.name)
@pytest.mark.parametrize("num_chunks", [3, 8, 80, 184])
@pytest.mark.parametrize("num_devices", [1, 8])
def test_one_pass_is_predicted_to_be_faster_than_chunks_even_where_it_spills(
    num_chunks: int, num_devices: int, hardware: Hardware
) -> None:
    deployment = Deployment(LLAMA_3_8B, Serving(hardware, num_devices), 0.0, PLAIN, 131_072)
    one = deployment.engine_work
    many = replace(one, chunks=DEFAULT_BOUNDS._replace(most_inline=MOST_INLINE))
    bucket = BatchShape.parse(f"--u/q2/s0/u{64 * num_chunks}/l2")
    found, cut = one.of(bucket), many.of(bucket)
    assert 0 <= found.spilled_bytes <= found.moved_bytes
    assert (found.num_region_calls, cut.spilled_bytes) == (0, 0)
    assert cut.num_region_calls > num_chunks * len(LLAMA_3_8B.layers)
    # The operators of the rounds alone cost more than what spills, whatever a call costs.
    seconds = [
        predict_seconds(replace(each.fused, num_region_calls=0), hardware, num_devices, FITTED).total
        for each in (found, cut)
    ]
    assert seconds[0] < seconds[1]


def test_work_spills_only_beyond_the_memory_on_the_chip() -> None:
    work = Deployment(LLAMA_3_8B, Serving(GAUDI3), 0.0, PLAIN, 131_072).engine_work
    small, large = (BatchShape.parse(f"--u/q1/s0/u{num}/l1") for num in (512, 2048))
    assert work.of(small).spilled_bytes == 0 < work.of(large).spilled_bytes
    assert replace(work, on_chip_bytes=None).of(large).spilled_bytes == 0


def test_shared_decodes_of_32k_tokens_call_no_region_and_mixed_steps_call_one_for_each_round() -> None:
    work = Deployment(LLAMA_3_8B, Serving(GAUDI3), 0.0, PLAIN, 131_072).engine_work
    num_layers = len(LLAMA_3_8B.layers)
    calls = {
        text: work.of(BatchShape.parse(text)).num_region_calls / num_layers
        for text in ("-su/q64/s256/u4096/l64", "c--/q1024/s0/u0/l1", "c-u/q512/s0/u4096/l8")
    }
    # New keys stay in the graph; all blocks are one round, with a piece of the layer after it.
    assert calls == {"-su/q64/s256/u4096/l64": 0, "c--/q1024/s0/u0/l1": 0, "c-u/q512/s0/u4096/l8": 2}


def test_steps_with_all_parts_call_as_many_regions_with_two_kinds_of_heads_as_with_one() -> None:
    served = (Deployment(LLAMA_3_8B, Serving(GAUDI3), share, PLAIN, 131_072) for share in (0.0, 0.5))
    one, two = (each.engine_work for each in served)
    num_layers = len(LLAMA_3_8B.layers)
    for text, beyond in (("csu/q512/s512/u4096/l17", 2), ("csu/q512/s1024/u4096/l17", 3)):
        bucket = BatchShape.parse(text)
        assert one.of(bucket).num_region_calls == beyond * num_layers
        # Rings stay in the graph; those of 16 layers are copied to the scratch by one call.
        assert two.of(bucket).num_region_calls == beyond * num_layers + num_layers // 16
        assert two.compiled(bucket).num_recipes == 1 + 3 + 1
