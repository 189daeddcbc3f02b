"""Heads are promoted to retrieval heads so that few kinds of layers have to be compiled."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from graphs import BucketTable
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.config.limits import HPU_LAYER_KINDS
from tests.modeling.dense_oracle import oracle_logits
from tests.modeling.driving import greedy_logits
from tests.modeling.families import BASE, BLOCK, FAMILIES, Zoo, prompts_of, save_random

NUM_HEADS = 6
COUNTS = (0, 1, 2, 2, 5, 6, 3)
"""Retrieval heads of each layer: six kinds, and four of them with two heads promoted, 0 to 1 and 5 to 6."""
FEWEST = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("many-kinds")
    heads = {"num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_HEADS}
    sizes = {"num_hidden_layers": len(COUNTS), "hidden_size": 8 * NUM_HEADS, **heads}
    return save_random(LlamaConfig(**{**BASE, **sizes}), directory), directory


def pattern_of(counts: tuple[int, ...], num_heads: int) -> HeadPattern:
    scores = np.random.default_rng(0).random((len(counts), num_heads), dtype=np.float32)
    ranks = np.argsort(np.argsort(-scores, axis=1), axis=1)
    return HeadPattern(scores, 2, 6, retrieval=ranks < np.array(counts)[:, None])


def load(
    path: Path, counts: tuple[int, ...] = COUNTS, num_heads: int = NUM_HEADS, **options: Any
) -> HPUDuoModel:
    limits = {"max_model_len": 64, "max_num_seqs": 6, "max_num_batched_tokens": 32, "num_blocks": 40}
    pattern = pattern_of(counts, num_heads)
    return HPUDuoModel.from_pretrained(path, pattern=pattern, block_size=BLOCK, **{**limits, **options})


def test_what_was_promoted_is_told_with_its_bytes(
    checkpoint: tuple[Any, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="hpu_duo"):
        served = load(checkpoint[1], max_layer_kinds=4, num_prefix_snapshots=1)
    plain = load(checkpoint[1], num_prefix_snapshots=1).stats().resolved
    resolved = served.stats().resolved
    assert (resolved.num_layer_kinds, plain.num_layer_kinds) == (4, 6)
    assert (resolved.num_promoted_heads, plain.num_promoted_heads) == (FEWEST, 0)
    assert resolved.num_retrieval_heads == plain.num_retrieval_heads + FEWEST
    assert resolved.promoted_bytes == resolved.kv_bytes - plain.kv_bytes > 0
    assert plain.promoted_bytes == 0
    streaming = len(COUNTS) * NUM_HEADS - sum(COUNTS)
    assert f"{FEWEST} of {streaming} streaming heads retrieve" in caplog.text
    note = served.stats().notes[-1]
    assert note.startswith(
        f"warning: {FEWEST} streaming heads are promoted to retrieval heads on this device"
    )
    assert f"takes {resolved.promoted_bytes / 2**20:,.1f} MiB of the KV cache" in note


def test_promoted_heads_see_the_whole_context(checkpoint: tuple[Any, Path]) -> None:
    model, path = checkpoint
    served = load(path, max_layer_kinds=2)
    pattern = served.engine.pattern
    assert pattern is not None
    assert len(set(pattern.head_counts)) == 2
    for prompt, (new, logits) in zip(prompts_of(), greedy_logits(served.engine, prompts_of(), 4)):
        expected = oracle_logits(model, pattern, [*prompt, *new[:-1]])[len(prompt) - 1 :]
        np.testing.assert_allclose(logits.numpy(), expected.numpy(), atol=1e-4, rtol=0)


@pytest.mark.usefixtures("simulated_hpu")
def test_an_hpu_has_few_kinds_unless_more_are_asked_for(checkpoint: tuple[Any, Path]) -> None:
    small = {
        "device": "hpu-sim",
        "max_num_seqs": 2,
        "buckets": BucketTable.from_strings(["csu/q32/s16/u24/l2"]),
    }
    served = load(checkpoint[1], **small)
    assert served.stats().resolved.num_layer_kinds == HPU_LAYER_KINDS
    assert served.stats().resolved.num_promoted_heads == FEWEST
    served = load(checkpoint[1], **small, max_layer_kinds=100)
    assert served.stats().resolved.num_layer_kinds == len(set(COUNTS))


def test_layers_with_a_window_are_a_kind_and_are_not_promoted(zoo: Zoo) -> None:
    """Layers 0, 1 and 3 have a window, and what a pattern says of them counts for nothing."""
    path = zoo.load("gemma3")[1]
    served = load(path, (1, 2, 0, 1), 2, max_layer_kinds=2, max_num_batched_tokens=16)
    assert served.stats().resolved.num_layer_kinds == 2
    assert served.stats().resolved.num_promoted_heads == 0
    with pytest.raises(ValueError, match="max_layer_kinds of at least 2, the structures"):
        load(path, (1, 2, 0, 1), 2, max_layer_kinds=1)


def test_layers_of_other_structure_share_out_the_kinds(zoo: Zoo) -> None:
    """Every other layer of the model has no rotary embedding."""
    assert "smollm3" in FAMILIES
    served = load(zoo.load("smollm3")[1], (0, 2, 1, 2), 2, max_layer_kinds=2)
    found = served.stats().resolved
    assert (found.num_layer_kinds, found.num_promoted_heads) == (2, 1)


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_number_that_is_no_count_is_refused(checkpoint: tuple[Any, Path], value: Any) -> None:
    with pytest.raises(ValueError, match="max_layer_kinds to be an integer >= 1"):
        load(checkpoint[1], max_layer_kinds=value)
