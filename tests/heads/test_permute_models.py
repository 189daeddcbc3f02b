"""The permutation of weights, on real transformers models with random weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GptOssConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from hpu_duo.heads import HeadLayout, HeadPattern, permute_heads

H, K, D, E = 8, 4, 12, 24
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": E,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama_gqa_with_biases": lambda: LlamaConfig(**SIZES, head_dim=D, attention_bias=True),
    "llama_mha": lambda: LlamaConfig(**{**SIZES, "num_key_value_heads": H}, head_dim=D),
    "qwen2_biases_on_qkv": lambda: Qwen2Config(**{**SIZES, "hidden_size": H * D}),
    "qwen3_norms_per_head": lambda: Qwen3Config(**SIZES, head_dim=D),
    "phi_dense_output_and_partial_rotary": lambda: PhiConfig(
        **{**SIZES, "hidden_size": H * D}, qk_layernorm=True
    ),
    "phi3_fused": lambda: Phi3Config(**{**SIZES, "hidden_size": H * D}),
    "olmo2_norms_over_the_projection": lambda: Olmo2Config(**{**SIZES, "hidden_size": H * D}),
    "cohere_norms_with_a_row_per_head": lambda: CohereConfig(
        **{**SIZES, "hidden_size": H * D}, use_qk_norm=True
    ),
    "gpt_oss_sinks": lambda: GptOssConfig(
        **SIZES, head_dim=D, num_local_experts=2, num_experts_per_tok=1, sliding_window=4
    ),
}


def random_model(name: str) -> tuple[Any, list[nn.Module]]:
    """A model whose every parameter, biases and norms included, differs from head to head."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=1.0 if parameter.ndim == 1 else 0.0, std=0.2)
    return model, [layer.self_attn for layer in model.model.layers]


def logits_of(model: nn.Module) -> torch.Tensor:
    tokens = torch.arange(20).remainder(61).reshape(2, 10)
    with torch.no_grad():
        return model(input_ids=tokens).logits


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_stay_the_same_and_weights_can_be_restored(name: str) -> None:
    model, attentions = random_model(name)
    num_kv_heads = model.config.num_key_value_heads
    pattern = HeadPattern.random(len(attentions), num_kv_heads, seed=3).binarise(
        sparsity=0.5, balance="per_layer"
    )
    layouts = [HeadLayout.by_group(1 - row.astype(int), H) for row in pattern.mask]
    assert not all(layout.is_identity for layout in layouts)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    logits = logits_of(model)

    permute_heads(attentions, layouts, D)
    assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())
    torch.testing.assert_close(logits_of(model), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_change_when_any_one_weight_is_left_behind(name: str) -> None:
    """Shows that the comparison above would notice: every tensor that moved matters."""
    model, attentions = random_model(name)
    layout = HeadLayout((1, 0, *range(2, model.config.num_key_value_heads)), H)
    logits = logits_of(model)
    before = {key: value.clone() for key, value in attentions[0].named_parameters()}
    permute_heads(attentions[:1], [layout], D)

    for key, parameter in attentions[0].named_parameters():
        moved = parameter.detach().clone()
        if torch.equal(moved, before[key]):
            continue
        parameter.data.copy_(before[key])
        assert (logits_of(model) - logits).abs().max() > 1e-4, key
        parameter.data.copy_(moved)
