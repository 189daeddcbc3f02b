"""Parameters of models that are built like Llama, from their configuration alone."""

from __future__ import annotations

from typing import Any

from hpu_duo.cost.model import AttentionSize, ModelSize

PLAIN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose parameters follow from their sizes."""


def plain_model(
    name: str, config: Any, layers: tuple[AttentionSize, ...], max_positions: int
) -> ModelSize | None:
    """Count a model of equal layers of four projections, a gated MLP and two norms; None for any other.

    Args:
        config: transformers', of one of the families or of any other.
        layers: sizes of the attention of each layer.
    """
    family = config.model_type
    if family not in PLAIN_FAMILIES or len(set(layers)) != 1:
        return None
    hidden, inner, num_layers = config.hidden_size, config.intermediate_size, len(layers)
    queries = layers[0].num_heads * layers[0].head_dim
    keys = layers[0].num_kv_heads * layers[0].head_dim
    matrices = 2 * hidden * (queries + keys) + 3 * hidden * inner
    other = 2 * hidden
    if family == "qwen2":
        other += queries + 2 * keys
    elif family != "mistral" and config.attention_bias:
        other += queries + 2 * keys + hidden
    if family == "llama" and config.mlp_bias:
        other += 2 * inner + hidden
    if family == "qwen3":  # norms of queries and keys
        other += 2 * layers[0].head_dim
    table = 0 if config.tie_word_embeddings else config.vocab_size * hidden
    return ModelSize(
        name=name,
        layers=layers,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        matrix_params=num_layers * matrices,
        other_params=num_layers * other + hidden + table,
        max_positions=max_positions,
    )
