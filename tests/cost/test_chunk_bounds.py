"""Bounds of chunks: one formula for the memory plan and for the size of a pass."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs import BatchShape, Phase, StepCost, StepLimits
from hpu_duo.planning import GAUDI2, GAUDI3, Hardware
from hpu_duo.planning.roofline import StepSeconds
from hpu_duo.startup.blueprint import chunk_bounds
from hpu_duo.startup.tables import model_cost
from kernels_ref import Blocks, HeadGroup, Implementation, LayerSpec
from kernels_ref.chunks import DEFAULT_BOUNDS, MOST_INLINE, ChunkBounds, num_parts, unique_block_bytes
from kernels_ref.groups.kind import HeadSizes, PartSizes
from kernels_ref.step import StepParts

GIB = 1 << 30


@given(
    num_rows=st.integers(1, 256),
    num_heads=st.integers(1, 8),
    group_size=st.integers(1, 16),
    block_size=st.sampled_from([16, 128, 256]),
    head_dim=st.sampled_from([64, 128, 256]),
    num_blocks=st.integers(1, 1 << 16),
    decode_len=st.integers(1, 4),
    bounds=st.sampled_from([DEFAULT_BOUNDS, ChunkBounds.of_hpu(GAUDI2.memory_bytes)]),
)
def test_a_chunk_of_the_unique_part_and_its_plan_follow_one_formula(
    num_rows: int,
    num_heads: int,
    group_size: int,
    block_size: int,
    head_dim: int,
    num_blocks: int,
    decode_len: int,
    bounds: ChunkBounds,
) -> None:
    heads = HeadSizes(num_heads, group_size, head_dim, 2)
    row_heads = decode_len * heads.num_query_heads
    each = unique_block_bytes(num_rows, row_heads, block_size, head_dim)
    chunk = bounds.unique(num_rows, row_heads, block_size, head_dim, heads.unit_bytes(block_size))
    assert chunk == 1 or chunk * each <= bounds.unique_bytes
    parts = StepParts(causal=False, shared=False, unique=True)
    sizes = PartSizes(
        parts, num_rows * decode_len, 0, num_blocks, num_rows, decode_len, block_size, chunks=bounds
    )
    planned = Blocks().transient_bytes(heads, sizes)
    tails = Blocks().transient_bytes(heads, sizes._replace(num_unique_blocks=0))
    assert planned == max(min(chunk, num_blocks) * each, tails)


@pytest.mark.parametrize("used", [0, 1 << 20, 3 * GIB])
@pytest.mark.parametrize("hardware", [GAUDI2, GAUDI3], ids=lambda each: each.name)
def test_devices_with_nearly_the_same_memory_have_the_same_bounds(hardware: Hardware, used: int) -> None:
    assert ChunkBounds.of_hpu(hardware.memory_bytes - used) == ChunkBounds.of_hpu(hardware.memory_bytes)
    assert ChunkBounds.of_hpu(hardware.memory_bytes).unique_bytes == 2 * GIB


@pytest.mark.parametrize("memory_bytes", [0, -1])
def test_a_device_without_memory_is_refused(memory_bytes: int) -> None:
    with pytest.raises(ValueError, match="memory_bytes >= 1"):
        ChunkBounds.of_hpu(memory_bytes)


def test_a_small_device_keeps_the_bounds_of_others() -> None:
    small = ChunkBounds.of_hpu(1)
    assert (small.unique_bytes, small.key_bytes) == (DEFAULT_BOUNDS.unique_bytes, DEFAULT_BOUNDS.key_bytes)


@pytest.mark.parametrize(("device", "one_pass"), [("hpu", True), ("cuda", False), ("cpu", False)])
def test_only_an_hpu_sizes_chunks_by_its_memory(device: str, one_pass: bool) -> None:
    bounds = chunk_bounds(1 << 20, torch.device(device), Implementation.REFERENCE, GAUDI3.memory_bytes)
    assert bounds.one_pass is one_pass
    assert (bounds.unique_bytes == DEFAULT_BOUNDS.unique_bytes) is not one_pass


LAYERS = {
    # Query heads, key/value heads, layers, and GiB of keys and values of a device.
    "8B on a Gaudi 3": (32, 8, 32, 89),
    "70B on 8": (8, 1, 80, 88),
    "Qwen3-30B-A3B": (32, 4, 48, 48),
    "Mistral-Small-24B": (32, 8, 40, 60),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("num_rows", [1, 64])
def test_every_decode_that_a_pool_holds_is_in_the_graph(name: str, num_rows: int) -> None:
    num_heads, num_kv, num_layers, cache_gib = LAYERS[name]
    key_bytes = num_kv * 128 * 128 * 2
    num_blocks = cache_gib * GIB // (2 * num_layers * key_bytes)
    bounds = ChunkBounds.of_hpu(GAUDI3.memory_bytes)
    chunk = bounds.unique(num_rows, num_heads, 128, 128, key_bytes)
    assert num_parts(num_blocks, chunk) == 1
    assert (
        num_parts(num_blocks, DEFAULT_BOUNDS.unique(num_rows, num_heads, 128, 128, key_bytes)) > MOST_INLINE
    )


@pytest.mark.parametrize("num_kv", [1, 8, 32])
def test_decodes_that_share_32k_tokens_are_in_the_graph(num_kv: int) -> None:
    bounds = ChunkBounds.of_hpu(GAUDI3.memory_bytes)
    chunk = bounds.masked(64, 128, num_kv * 128 * 128 * 2, 2)
    assert num_parts(32_768 // 128, chunk) <= MOST_INLINE


def test_buckets_of_an_engine_are_ranked_by_the_passes_of_its_device() -> None:
    limits = StepLimits(
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=131_072,
        block_size=128,
        num_blocks=5632,
        decode_len=1,
        max_chunk_rows=1,
    )
    sizes = SimpleNamespace(hidden_size=4096, vocab_size=128_256)
    spec = LayerSpec((HeadGroup(8, Blocks()),), 4, 128, 1.0, None, Implementation.REFERENCE)
    on_hpu = replace(spec, chunks=ChunkBounds.of_hpu(GAUDI3.memory_bytes))
    assert isinstance(model_cost(limits, [spec], sizes), StepCost)
    cost = model_cost(limits, [on_hpu], sizes)
    assert isinstance(cost, StepSeconds)
    fewer, more = (cost.work.of(BatchShape(Phase(unique=True), 64, 0, num, 64)) for num in (1408, 5632))
    assert fewer.num_launches == more.num_launches
    assert fewer.weight_bytes == more.weight_bytes > 2 * 4096 * 128_256
