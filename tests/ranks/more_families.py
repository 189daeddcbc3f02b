"""Tiny configurations of further families with a tensor-parallel plan, served by several ranks or refused."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.modeling.families import BASE, VOCAB, WINDOW

_SMALL = {**BASE, "num_hidden_layers": 2}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {**_MOE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_ROUTED["first_k_dense_replace"] = 1

_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

_GEMMA4 = {
    # With tied embeddings random models repeat the last token.
    "tie_word_embeddings": False,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": WINDOW,
}

SERVED: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere2_moe": {**_MOE, "num_experts": 4, "sliding_window": WINDOW},
    "cwm": {"head_dim": 8, "sliding_window": WINDOW},
    "dots1": _ROUTED,
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "exaone4": {"sliding_window": WINDOW},
    "exaone_moe": {**_MOE, "num_experts": 4, "num_shared_experts": 1, "sliding_window": WINDOW},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {"head_dim": 8},
    "gemma3": {
        "text_config": {"head_dim": 8, "sliding_window": WINDOW},
        "vision_config": _TOWER,
        "mm_tokens_per_image": 4,
        **{f"{kind}_token_index": VOCAB - 1 for kind in ("image", "boi", "eoi")},
    },
    "gemma4": {
        "text_config": {**_GEMMA4, "hidden_size_per_layer_input": 0},
        "vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 8},
    },
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {**_ROUTED, "head_dim": 8},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "hy_v3": {**_MOE, "num_experts": 4, "num_shared_experts": 1, "head_dim": 8},
    "hyperclovax": {},
    "internlm3": {"head_dim": 8},
    "iquestcoder": {},
    "jais2": {},
    "kolibri1": {**_ROUTED, "head_dim": 8},
    "mellum": {**_MOE, "num_experts": 4, "head_dim": 8, "sliding_window": WINDOW},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "minimax_m3_vl_text": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "ministral": {"head_dim": 8, "sliding_window": WINDOW},
    "ministral3": {"head_dim": 8},
    "nanochat": {},
    "olmo": {},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_MOE, "num_experts": 4, "shared_expert_intermediate_size": 24},
    "seed_oss": {"head_dim": 8},
    "solar_open": {**_ROUTED, "head_dim": 8},
    "vaultgemma": {"head_dim": 8, "sliding_window": WINDOW},
}
"""Settings besides ``BASE`` of families that several ranks serve, by model type."""

SERVED |= {
    "afmoe": {
        **_MOE,
        "num_experts": 4,
        "head_dim": 8,
        "num_dense_layers": 1,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "beam": {
        **_MOE,
        "num_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 8,
        "sliding_window": WINDOW,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "flint": {
        **_MOE,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        "head_dim": 8,
        "sliding_window": WINDOW,
        "mlp_only_layers": [0],
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gemma4_text": _GEMMA4,
    "gemma4_text, experts and keys as values": {
        **_MOE,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": False,
        "sliding_window": WINDOW,
    },
    "gemma4_text, shared keys": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "head_dim": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
        "sliding_window": WINDOW,
    },
    "gpt_neox": {},
    "gpt_neox, biases": {
        "attention_bias": False,
        "use_parallel_residual": False,
        "tie_word_embeddings": True,
    },
    "laguna, channels": {
        **_MOE,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        "head_dim": 8,
        "gating": "per-element",
        "mlp_layer_types": ["sparse", "dense"],
    },
    "olmoe, clip": {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5, "num_key_value_heads": 4},
    "granite_swa": {"sliding_window": WINDOW},
    "granitemoe_swa": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "helium": {"head_dim": 8},
    "laguna": {
        **_MOE,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        "head_dim": 8,
        "num_attention_heads_per_layer": [4, 8],
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}

_LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
_LATENT["num_key_value_heads"] = 4
SERVED |= {
    "deepseek_v2": {**_ROUTED, **_LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**_ROUTED, **_LATENT, "q_lora_rank": 16},
    "glm4_moe_lite": {**_ROUTED, **_LATENT, "q_lora_rank": 16},
    "minicpm3": {**_LATENT, "q_lora_rank": 16},
    "youtu": {**_LATENT, "q_lora_rank": 16},
    "mimo_v2_flash": {**_ROUTED, "head_dim": 12, "v_head_dim": 8, "swa_head_dim": 12, "swa_v_head_dim": 8},
    "gemma4_unified_text": _GEMMA4,
}
OTHER_WAYS = (
    *("afmoe", "aria_text", "beam", "flint", "gemma4_text", "gpt_neox", "granite_swa", "granitemoe_swa"),
    *("helium", "laguna", "olmoe", "deepseek_v3", "glm4_moe_lite"),
)
"""Families that four ranks serve as well, and two by context or with streaming heads."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # The norm is of the sum of the experts.
    "axk1": ({**_ROUTED, **_LATENT, "q_lora_rank": 16}, "mlp.post_mlp_layernorm"),
    # It reads a row of the table of tokens where its tokens are images.
    "gemma4, images in a second table": (
        {"text_config": _GEMMA4, "vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 8}},
        "no attribute 'weight'",
    ),
    # Its MLPs keep the largest activations of all of their width.
    "gemma3n_text": (
        {
            "head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "num_kv_shared_layers": 0,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.5, 0.0],
        },
        "mlp.gate_proj.weight",
    ),
}
"""The same of families that they refuse, with the module or parameter that no rule shares."""


def is_known(name: str) -> bool:
    """Whether the installed transformers has the family."""
    return name.partition(",")[0] in CONFIG_MAPPING


def tiny(name: str, changes: dict[str, Any]) -> PretrainedConfig:
    """Return a tiny configuration of a family, or of one that has a decoder and a tower for images."""
    if "text_config" in changes:
        changes = {**changes, "text_config": {**_SMALL, **changes["text_config"]}}
        return AutoConfig.for_model(name.partition(",")[0], **changes)
    return AutoConfig.for_model(name.partition(",")[0], **{**_SMALL, **changes})
