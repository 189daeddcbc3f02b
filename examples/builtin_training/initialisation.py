"""The built-in model's shape, and an initialisation from which copying is learned in minutes on a CPU."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from builtin_training.attention import ATTENTION_NAME, register

CONFIG: dict[str, Any] = {
    "vocab_size": 1152,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The shape (3.7 M parameters), as the fields of a transformers ``config.json``."""

_CONSTANT_DIMS = 16
_EMBEDDING_STD = 0.5


@dataclass(frozen=True)
class Shape:
    """The sizes that can be chosen; the defaults are the shipped model's."""

    num_layers: int = CONFIG["num_hidden_layers"]
    hidden_size: int = CONFIG["hidden_size"]
    intermediate_size: int = CONFIG["intermediate_size"]
    num_heads: int = CONFIG["num_attention_heads"]
    num_kv_heads: int = CONFIG["num_key_value_heads"]
    head_dim: int = CONFIG["head_dim"]

    def __post_init__(self) -> None:
        if self.num_layers < 4 or self.num_kv_heads < 4 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                "expected at least 4 layers and 4 KV heads that divide the query heads, got "
                f"{self.num_layers} layers, {self.num_kv_heads} KV heads and {self.num_heads} query heads"
            )
        if self.head_dim % 2 or self.head_dim < 32 or self.hidden_size < 64:
            raise ValueError(
                f"expected an even head_dim >= 32 and hidden_size >= 64, got {self.head_dim} and "
                f"{self.hidden_size}"
            )

    @property
    def config(self) -> dict[str, Any]:
        """The fields of a ``config.json``."""
        return {
            **CONFIG,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
        }


SHIPPED = Shape()


def build_model(seed: int, shape: Shape = SHIPPED) -> LlamaForCausalLM:
    """A float32 model with the training attention, initialised for fast emergence of retrieval.

    Three departures from the usual initialisation: the output head starts as a rotation of the embedding (a
    tied head makes early layers erase the current token), a few embedding dimensions start constant (so that
    attention can depend on position alone), and one KV head of layer 0 starts out looking one and two tokens
    back. Everything stays trainable.
    """
    register()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**shape.config, "attn_implementation": ATTENTION_NAME}))
    with torch.no_grad():
        _scale_projections(model)
        embedding = model.model.embed_tokens.weight
        embedding.normal_(std=_EMBEDDING_STD)
        rotation = torch.linalg.qr(torch.randn(shape.hidden_size, shape.hidden_size)).Q
        model.lm_head.weight.copy_(embedding @ rotation)
        model.model.norm.weight.fill_(2 / math.sqrt(shape.hidden_size))
        embedding[:, :_CONSTANT_DIMS] = 1.0
        _look_back(model, shape, query_heads={0: 1, 1: 2})
    return model


def _scale_projections(model: LlamaForCausalLM) -> None:
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and ".layers." in name:
            gain = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            weight.normal_(std=gain / math.sqrt(weight.shape[1]))


def _look_back(model: LlamaForCausalLM, shape: Shape, query_heads: dict[int, int]) -> None:
    """Make ``query_heads`` (head -> distance) of layer 0 attend to the token that many places back.

    Query and key read only the constant dimensions. After RoPE their product is a sum of cosines of
    ``(distance to the key - wanted distance) * frequency``, so it peaks at the wanted distance.
    """
    attention = model.model.layers[0].self_attn
    head_dim, hidden_size = shape.head_dim, shape.hidden_size
    half = head_dim // 2
    frequencies = CONFIG["rope_theta"] ** (-torch.arange(half) / half)
    # Lower frequencies cannot tell neighbours apart; leaving them out keeps the logits small.
    amplitude = torch.where(torch.arange(half) < 12, 1.0, 0.0)
    gap_nats = 6.0
    logit_gap = (amplitude * (1 - frequencies.cos())).sum() / math.sqrt(head_dim)
    amplitude *= torch.sqrt(gap_nats / logit_gap)

    mean_square = (_CONSTANT_DIMS + (hidden_size - _CONSTANT_DIMS) * _EMBEDDING_STD**2) / hidden_size
    # Value of a constant dimension after the layer's RMS norm is mean_square ** -0.5.
    per_dim = math.sqrt(mean_square) / _CONSTANT_DIMS

    def rows(weight: Tensor, head: int) -> Tensor:
        return weight[head * head_dim : (head + 1) * head_dim]

    for head, distance in query_heads.items():
        phase = -distance * frequencies
        wanted = torch.cat((amplitude * phase.cos(), amplitude * phase.sin()))
        _read_constant_dims(rows(attention.q_proj.weight, head), wanted * per_dim)
    wanted = torch.cat((amplitude, torch.zeros(half)))
    for kv_head in {head * shape.num_kv_heads // shape.num_heads for head in query_heads}:
        _read_constant_dims(rows(attention.k_proj.weight, kv_head), wanted * per_dim)


def _read_constant_dims(rows: Tensor, value: Tensor) -> None:
    rows.zero_()
    rows[:, :_CONSTANT_DIMS] = value.unsqueeze(1)
