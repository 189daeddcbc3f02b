"""No graph that is compiled by itself grows with the context, whatever the model."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphs import BatchShape
from hpu_duo.config.engine import CacheConfig, EngineConfig, HeadConfig, ModelConfig, SchedulerConfig
from hpu_duo.heads import HeadPattern
from hpu_duo.lab.audit import LoweredGraph, build_structure, lower_bucket
from hpu_duo.lab.rules import REGION_NODES
from hpu_duo.planning import GAUDI3
from tests.modeling.families import IS_5, make_config
from tests.tiers import every

SIZES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32},
    "LlamaConfig, 7B": {"hidden_size": 4096, "intermediate_size": 11_008, "num_attention_heads": 32},
    "LlamaConfig, 70B": {"hidden_size": 8192, "intermediate_size": 28_672, "num_attention_heads": 64},
    "MistralConfig": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "sliding_window": None,
    },
    "Qwen2Config": {"hidden_size": 3584, "intermediate_size": 18_944, "num_attention_heads": 28},
    "Qwen3Config": {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32},
    "Gemma2Config": {"hidden_size": 3584, "intermediate_size": 14_336, "num_attention_heads": 16},
    "Qwen3MoeConfig": {
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    },
    "MixtralConfig": {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32},
}
KV_HEADS = {"Qwen2Config": 4, "Qwen3MoeConfig": 4, "LlamaConfig, 7B": 32}
HEAD_DIM = {"Gemma2Config": 256}
MANY = "Qwen3MoeConfig"
"""With so many experts that they run in groups."""
BLOCKS = 262_144 // 128
LONG = (
    f"csu/q2048/s{BLOCKS}/u{BLOCKS}/l17",
    f"csu/q8192/s{BLOCKS}/u{BLOCKS}/l9",
    f"--u/q1/s0/u{BLOCKS}/l1",
    f"-su/q32/s{BLOCKS}/u{BLOCKS}/l32",
    "csu/q272/s4/u16/l17",
    "cs-/q2048/s64/u0/l1",
    "c-u/q2048/s0/u64/l17",
    "c--/q2048/s0/u0/l1",
)
CASES = [("LlamaConfig", shape) for shape in (*LONG[4:], *LONG[2:4], LONG[0])]
CASES += [(name, shape) for name in SIZES if name not in ("LlamaConfig", MANY) for shape in LONG[::2]]


def graphs_of(name: str, attention: str, shape: str, directory: Path) -> tuple[LoweredGraph, ...]:
    num_layers = 2 if name == "Gemma2Config" else 1
    kv_heads, family = KV_HEADS.get(name, 8), name.partition(",")[0]
    config = make_config(
        family,
        **SIZES[name],
        num_hidden_layers=num_layers,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM.get(name, 128),
        max_position_embeddings=262_144,
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    retrieval = np.zeros((num_layers, kv_heads), np.bool_)
    retrieval[:, : kv_heads // 2] = True
    pattern = HeadPattern(retrieval.astype(np.float32), sink=64, recent=256, retrieval=retrieval)
    structure = build_structure(
        EngineConfig(
            model=ModelConfig(path=directory, attention=attention),
            heads=HeadConfig(pattern=pattern),
            cache=CacheConfig(block_size=128, num_blocks=BLOCKS),
            scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=8192),
        ),
        GAUDI3,
    )
    return lower_bucket(structure, BatchShape.parse(shape))


@pytest.mark.slow
@pytest.mark.parametrize("policy", every(2, ["h2o", "snapkv"]))
def test_no_graph_of_a_budget_that_verifies_nine_tokens_is_large(policy: str, tmp_path: Path) -> None:
    config = make_config(
        "LlamaConfig",
        **SIZES["LlamaConfig"],
        num_hidden_layers=1,
        num_key_value_heads=8,
        head_dim=128,
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path)
    structure = build_structure(
        EngineConfig(
            model=ModelConfig(path=tmp_path, attention="hpu"),
            cache=CacheConfig(
                block_size=128, num_blocks=BLOCKS, kv_policy=policy, kv_budget=256, kv_chunk=256
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=32,
                max_num_batched_tokens=8192,
                speculative_config={"num_speculative_tokens": 8},
            ),
        ),
        GAUDI3,
    )
    check(lower_bucket(structure, BatchShape.parse("--u/q72/s0/u0/l8")))


def check(graphs: tuple[LoweredGraph, ...]) -> None:
    largest = max(graphs, key=lambda graph: graph.num_nodes)
    assert largest.num_nodes <= REGION_NODES, largest
    assert not any(graph.store_copies for graph in graphs)


@pytest.mark.slow
@pytest.mark.parametrize("attention", every(2, ["hpu", "reference"]))
def test_no_graph_of_llama_is_large_after_256k_tokens(attention: str, tmp_path: Path) -> None:
    shapes = (f"csu/q8192/s{num}/u{num}/l9" for num in (BLOCKS // 2, BLOCKS))
    long, longer = (graphs_of("LlamaConfig", attention, shape, tmp_path) for shape in shapes)
    for graphs in (long, longer):
        check(graphs)
    assert [graph.num_nodes for graph in long] == [graph.num_nodes for graph in longer]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_step_without_context_is_one_graph_for_each_layer(tmp_path: Path) -> None:
    graphs = graphs_of("LlamaConfig", "hpu", "c--/q2048/s0/u0/l1", tmp_path)
    check(graphs)
    assert [graph.region for graph in graphs] == ["prepare", "run_layer"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "attention"),
    every(
        4, list(product([f"--u/q32/s0/u{BLOCKS}/l32", f"-su/q16/s256/u{BLOCKS}/l16"], ["hpu", "reference"]))
    ),
)
def test_a_decode_after_a_long_context_is_one_graph_for_each_layer(
    shape: str, attention: str, tmp_path: Path
) -> None:
    graphs = graphs_of("LlamaConfig", attention, shape, tmp_path)
    check(graphs)
    assert [graph.region for graph in graphs] == ["prepare", "run_layer"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(not IS_5, reason="before 5, experts have shapes that depend on the routing")
@pytest.mark.parametrize("shape", [LONG[1], f"csu/q1940/s{BLOCKS}/u{BLOCKS}/l17"])
def test_no_graph_of_many_experts_is_large(shape: str, tmp_path: Path) -> None:
    check(graphs_of(MANY, "hpu", shape, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "attention"),
    every(100, [(*case, attention) for attention in ("reference", "hpu") for case in CASES]),
)
def test_no_graph_of_a_known_model_is_large(name: str, attention: str, shape: str, tmp_path: Path) -> None:
    check(graphs_of(name, attention, shape, tmp_path))
