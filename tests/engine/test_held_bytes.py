"""Bytes: what is held equals the formula, and half of the heads streaming halves it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny
from tests.kv.layers import layer_kv
from tests.modeling.families import BASE, BLOCK, prompts_of, save_random

LAYERS, KV_HEADS, HEAD_DIM, FLOAT = 2, 2, 8, 4


def test_held_bytes_are_those_of_leased_blocks_and_rows(tiny: Tiny) -> None:
    served = tiny.load(pattern=PATTERN, num_blocks=40, enable_prefix_caching=False)
    engine = served.engine
    for prompt in prompts_of([30, 9, 17]):
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=20))
    token = 2 * HEAD_DIM * FLOAT
    ring = LAYERS * (PATTERN.sink + PATTERN.recent) * token
    checked = 0
    while engine.has_unfinished:
        engine.step()
        stats = served.stats()
        rows = engine.scheduler.num_running
        blocks = sum(
            -(-request.num_computed_tokens // BLOCK)
            for name in ("request-0", "request-1", "request-2")
            if (request := engine.scheduler.get(f"{name}#0")) is not None
        )
        assert stats.used_blocks == blocks
        # One retrieval and one streaming head in each layer.
        assert stats.held_bytes == blocks * BLOCK * LAYERS * token + rows * ring
        assert stats.full_attention_bytes == engine.scheduler.num_cached_tokens * LAYERS * KV_HEADS * token
        checked += blocks > 0
    assert checked > 15
    # With the null unit of both, and the scratch of one row.
    assert served.stats().kv_bytes == 41 * BLOCK * LAYERS * token + (5 + 1) * ring


def test_what_is_shared_counts_once_and_is_told_apart(tiny: Tiny) -> None:
    engine = tiny.load(num_blocks=40).engine
    (shared,) = prompts_of([3 * BLOCK])
    done = [[*shared, number] for number in (5, 6)]
    greedy = SamplingParams(temperature=0, max_tokens=2)
    engine.generate([shared], greedy)
    engine.generate(done, greedy)
    stats, block = engine.stats(), engine.runner.store.plan.block_bytes
    assert stats.peak_full_attention_bytes == engine.runner.store.plan.full_attention_bytes(
        2 * (3 * BLOCK + 2)
    )
    assert stats.peak_unshared_bytes == 2 * 4 * block
    assert stats.peak_held_bytes == (3 + 2) * block


def test_kv_bytes_are_those_of_the_tensors(tiny: Tiny) -> None:
    for pattern in (None, PATTERN):
        store = tiny.load(pattern=pattern).engine.runner.store
        assert store.num_bytes == store.plan.total_bytes
        flats = [flat for layer in store.layers for x in layer for flat in (*x.tensors, *(x.scratch or ()))]
        assert store.num_bytes == sum(flat.numel() * flat.element_size() for flat in flats)


def test_half_of_the_heads_streaming_at_32k_tokens_hold_less_than_0_51_of_full_attention() -> None:
    """Llama-3-8B's shape, with the window that its published pattern was trained for."""
    layer = layer_kv(4, 4, 128, 64 + 256)
    plan = MemoryPlan((layer,) * 32, dtype_bytes=2, block_size=128, max_num_seqs=1, num_blocks=256)
    assert plan.bytes_per_request(32768) / plan.full_attention_bytes(32768) < 0.51


@pytest.mark.slow
def test_a_real_store_of_32k_tokens_at_half_sparsity_holds_less_than_0_51(tmp_path: Path) -> None:
    config = LlamaConfig(**{**BASE, "max_position_embeddings": 40000, "num_hidden_layers": 2})
    save_random(config, tmp_path)
    scores = np.array([[0.9, 0.1], [0.2, 0.8]], np.float32)
    served = HPUDuoModel.from_pretrained(
        tmp_path,
        pattern=HeadPattern(scores, sink=32, recent=96),
        sparsity=0.5,
        attention="auto",
        max_num_seqs=1,
        max_num_batched_tokens=4096,
        max_model_len=32768 + 1,
        enable_prefix_caching=False,
    )
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, BASE["vocab_size"], (32768,), generator=generator).tolist()
    engine = served.engine
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=1))
    while engine.has_unfinished:
        engine.step()
    stats = served.stats()
    assert stats.peak_full_attention_bytes == 32768 * LAYERS * KV_HEADS * 2 * HEAD_DIM * FLOAT
    assert stats.peak_held_bytes / stats.peak_full_attention_bytes < 0.51
    # The null block and the null row included.
    assert stats.kv_bytes / stats.peak_full_attention_bytes < 0.51


@pytest.mark.parametrize(
    "options", [{"num_blocks": 10**12}, {"max_num_seqs": 10**9, "num_blocks": 12, "pattern": PATTERN}]
)
def test_a_cache_larger_than_the_free_memory_is_refused_before_it_is_allocated(
    tiny: Tiny, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"needs \d+ bytes .* only \d+ bytes are free"):
        tiny.load(**{"max_num_batched_tokens": 10**9, **options})
