"""Bytes of weights and caches: exact, because they follow from shapes, and the same on every machine."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.gpu_suite.results import Key, Point, Results
from benchmarks.gpu_suite.shapes import ModelShape, Sizes
from bias_builders import Window
from hpu_duo.heads import HeadPattern
from hpu_duo.kv.plan import LayerKV, MemoryPlan, head_groups

FULL = "full attention"
DUO = "DuoAttention"
SYSTEMS = (FULL, DUO)


def make_pattern(model: ModelShape) -> HeadPattern:
    """A random pattern with the model's share of retrieval heads, as even over the layers as it can be."""
    pattern = HeadPattern.random(
        model.num_layers, model.num_kv_heads, 0, sink=model.sink, recent=model.recent
    )
    return pattern.binarise(sparsity=1 - model.retrieval_share, balance="per_layer")


def kv_plan(model: ModelShape, system: str, num_tokens: int, block_size: int, dtype_bytes: int) -> MemoryPlan:
    """The stores that hold one request of ``num_tokens`` tokens, and no more."""
    if system == FULL:
        counts = ((model.num_kv_heads, 0),) * model.num_layers
    else:
        counts = make_pattern(model).head_counts
    window = Window(model.sink, model.recent)
    layers = tuple(LayerKV(head_groups(*count, window), model.head_dim) for count in counts)
    return MemoryPlan(layers, dtype_bytes, block_size, 1, num_blocks=-(-num_tokens // block_size))


def llama_config(model: ModelShape, max_positions: int) -> LlamaConfig:
    """transformers' configuration of a shape, able to see ``max_positions``."""
    return LlamaConfig(
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        max_position_embeddings=max_positions,
    )


def weight_bytes(model: ModelShape, dtype_bytes: int) -> int:
    """Bytes of all parameters."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(llama_config(model, 8))
    return dtype_bytes * sum(parameter.numel() for parameter in skeleton.parameters())


def context_reaching(
    ratio: float, model: ModelShape, weights: int, block_size: int, dtype_bytes: int
) -> int | None:
    """The least whole number of blocks, in tokens, at which full attention takes ``ratio`` times the memory.

    Weights are counted on both sides. None when no context reaches it.
    """
    wanted = Fraction(ratio).limit_denominator(10_000)

    def surplus(num_blocks: int) -> Fraction:
        full, duo = (
            kv_plan(model, system, num_blocks * block_size, block_size, dtype_bytes).total_bytes + weights
            for system in SYSTEMS
        )
        return full - wanted * duo

    # Linear in the number of blocks.
    first, slope = surplus(1), surplus(2) - surplus(1)
    if first >= 0:
        return block_size
    return None if slope <= 0 else block_size * (1 + math.ceil(-first / slope))


def compute_memory(sizes: Sizes, dtype_bytes: int, results: Results) -> None:
    """Weights and stores of every model at every context of the decode curves."""
    for model in sizes.models:
        weights = weight_bytes(model, dtype_bytes)
        for context in sizes.decode_contexts:
            for system in SYSTEMS:
                stores = kv_plan(model, system, context, sizes.block_size, dtype_bytes).total_bytes
                key = Key("memory", f"{model.name} at {context}", system)
                results.add(Point(key, {"context": context, "weights_bytes": weights, "kv_bytes": stores}))
        published = model.published.memory
        reached = context_reaching(published, model, weights, sizes.block_size, dtype_bytes)
        results.add(
            Point(
                Key("memory", f"{model.name}: {published}x less is reached", DUO),
                {} if reached is None else {"context": reached},
                "" if reached is not None else "at no context",
            )
        )
