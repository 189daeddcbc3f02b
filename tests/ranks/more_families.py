"""Tiny configurations of further families with a tensor-parallel plan, served by several ranks or refused."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.modeling.families import BASE, WINDOW

_SMALL = {**BASE, "num_hidden_layers": 2}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {**_MOE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_ROUTED["first_k_dense_replace"] = 1

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

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "afmoe": ({**_MOE, "num_experts": 4, "head_dim": 8}, "self_attn.gate_proj.weight"),
    "aria_text": ({"moe_num_experts": 4, "moe_topk": 2}, "mlp.experts.gate_up_proj"),
    "beam": ({**_MOE, "head_dim": 8}, "self_attn.gate_bias"),
    "flint": ({**_MOE, "head_dim": 8}, "self_attn.sinks"),
    "gemma4_text": ({"head_dim": 8}, "self_attn.q_proj.weight"),
    "gpt_neox": ({}, "attention.dense.weight"),
    "granite_swa": ({}, "self_attn.sinks"),
    "granitemoe_swa": ({"num_local_experts": 4, "num_experts_per_tok": 2}, "self_attn.sinks"),
    "helium": ({"head_dim": 8}, "self_attn.o_proj.weight"),
    "laguna": ({**_MOE, "num_experts": 4, "head_dim": 8}, "self_attn.q_proj.weight"),
    "olmoe": ({"num_experts": 4, "num_experts_per_tok": 2}, "self_attn.q_norm.weight"),
}
"""The same of families that they refuse, with the parameter that no rule shares."""


def is_known(name: str) -> bool:
    """Whether the installed transformers has the family."""
    return name in CONFIG_MAPPING


def tiny(name: str, changes: dict[str, Any]) -> PretrainedConfig:
    """Return a tiny configuration of a family."""
    return AutoConfig.for_model(name, **{**_SMALL, **changes})
