from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.kv.plan import LayerKV, MemoryPlan
from kernels_ref import Rings
from tests.kv.layers import layer_kv


def _layers() -> st.SearchStrategy[tuple[LayerKV, ...]]:
    heads = st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(any)
    layer = st.builds(
        lambda heads, *sizes: layer_kv(*heads, *sizes),
        heads,
        st.integers(1, 16),
        st.integers(1, 32),
        st.none() | st.integers(1, 16),
        st.integers(0, 9),
    )
    return st.lists(layer, min_size=1, max_size=4).map(tuple)


def _allocate(plan: MemoryPlan) -> int:
    """Bytes of the tensors themselves, by their shapes."""
    total = 0
    for layer in plan.layers:
        value_dim = layer.value_head_dim or layer.head_dim
        for dim in (layer.head_dim, value_dim):
            for group in layer.groups:
                units, slots = plan.num_blocks, plan.block_size
                if isinstance(group.kind, Rings):
                    # And the scratch.
                    units = plan.max_num_seqs + plan.max_chunk_rows
                    slots = group.kind.window.size + group.kind.slack
                total += np.empty((units + 1, group.num_heads, slots, dim), dtype=np.uint8).nbytes
    return total * plan.dtype_bytes


@given(
    _layers(),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 16),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 3),
)
def test_total_bytes_are_those_of_the_tensors(
    layers: tuple[LayerKV, ...],
    dtype_bytes: int,
    block_size: int,
    max_num_seqs: int,
    num_blocks: int,
    max_chunk_rows: int,
) -> None:
    sizes = (dtype_bytes, block_size, max_num_seqs, num_blocks)
    plan = MemoryPlan(layers, *sizes, max_chunk_rows=max_chunk_rows)
    assert plan.total_bytes == _allocate(plan)


@given(_layers(), st.integers(1, 16), st.integers(1, 4), st.integers(0, 20_000))
def test_a_budget_is_used_up_to_less_than_one_block(
    layers: tuple[LayerKV, ...], block_size: int, max_num_seqs: int, extra: int
) -> None:
    smallest = MemoryPlan(layers, 2, block_size, max_num_seqs, max_num_seqs)
    budget = smallest.total_bytes + extra
    plan = MemoryPlan.from_budget(
        layers, dtype_bytes=2, block_size=block_size, max_num_seqs=max_num_seqs, kv_cache_bytes=budget
    )
    assert _allocate(plan) <= budget
    if plan.uses_blocks:
        assert budget - plan.total_bytes < plan.block_bytes
        assert plan.max_tokens == plan.num_blocks * block_size


def test_a_budget_one_byte_too_small_says_what_is_needed_and_what_came() -> None:
    layers = (layer_kv(2, 2, 64, 320),)
    needed = MemoryPlan(layers, 2, 128, 8, 8).total_bytes
    with pytest.raises(
        ValueError, match=rf"needs at least {needed} bytes \(.* GiB\).*got {needed - 1} bytes"
    ):
        MemoryPlan.from_budget(
            layers, dtype_bytes=2, block_size=128, max_num_seqs=8, kv_cache_bytes=needed - 1
        )


def test_a_request_keeps_whole_blocks_and_one_row() -> None:
    plan = MemoryPlan((layer_kv(1, 3, 8, 20), layer_kv(4, 0, 8, 20)), 2, 16, 4, 10)
    per_token_and_head = 2 * 8 * 2
    assert plan.block_bytes == 16 * 5 * per_token_and_head
    assert plan.bytes_per_request(17) == 2 * 16 * 5 * per_token_and_head + 3 * 20 * per_token_and_head
    assert plan.bytes_per_request(0) == plan.row_bytes


def test_full_attention_keeps_every_token_in_every_head() -> None:
    plan = MemoryPlan((layer_kv(1, 3, 8, 20), layer_kv(4, 0, 8, 20)), 2, 16, 4, 10)
    assert plan.full_attention_bytes(17) == 17 * 8 * (2 * 8 * 2)


def test_the_saving_approaches_the_share_of_retrieval_heads() -> None:
    plan = MemoryPlan(tuple(layer_kv(4, 4, 128, 320) for _ in range(32)), 2, 128, 1, 8192)
    ratio = plan.full_attention_bytes(1 << 20) / plan.bytes_per_request(1 << 20)
    assert ratio == pytest.approx(2.0, rel=1e-3)


def test_layers_may_keep_rings_of_different_sizes() -> None:
    plan = MemoryPlan((layer_kv(0, 2, 8, 20), layer_kv(0, 2, 8, 100)), 2, 16, 4, 0)
    assert plan.row_bytes == 2 * (20 + 100) * 16 * 2


def test_without_retrieval_heads_there_are_no_blocks_and_no_bound_on_tokens() -> None:
    plan = MemoryPlan.from_budget(
        (layer_kv(0, 2, 8, 20),), dtype_bytes=2, block_size=16, max_num_seqs=4, kv_cache_bytes=10**6
    )
    assert (plan.uses_blocks, plan.num_blocks, plan.max_tokens) == (False, 0, None)
    assert plan.total_bytes == (4 + 1) * plan.row_bytes + plan.scratch_bytes == 6 * plan.row_bytes
    assert plan.bytes_per_request(10**6) == plan.row_bytes


@pytest.mark.parametrize(
    ("heads", "message"),
    [((0, 0, 8, 4), "1 KV head or more"), ((1, 1, 8, 0), "recent >= 1"), ((-1, 1, 8, 4), "got -1")],
)
def test_impossible_layers_are_refused(heads: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_kv(*heads)


def test_impossible_plans_are_refused() -> None:
    layer = layer_kv(1, 1, 8, 4)
    with pytest.raises(ValueError, match="num_blocks"):
        MemoryPlan((layer,), 2, 16, 4, 0)
    with pytest.raises(ValueError, match="block_size must be 1 or more, got 0"):
        MemoryPlan((layer,), 2, 0, 4, 1)
    with pytest.raises(ValueError, match="at least one layer"):
        MemoryPlan((), 2, 16, 4, 1)
