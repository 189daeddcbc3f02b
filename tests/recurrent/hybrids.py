"""Tiny random checkpoints of families whose layers have states beside keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from hpu_duo import HPUDuoModel
from hpu_duo.modeling.recurrent import has_states
from tests.modeling.families import BASE, BLOCK, VERSION, WINDOW, is_known, make_config, save_random

_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv", "conv"]}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_MIXED = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
HYBRIDS: dict[str, dict[str, Any]] = {
    "Lfm2Config": _CONVOLUTIONS,
    "Qwen3NextConfig": {**_DELTA, "mlp_only_layers": [0, 1, 2, 3]},
    "Lfm2MoeConfig": {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 2},
    "Lfm3Config": {
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
        "head_dim": 8,
        "sliding_window": WINDOW,
    },
    "OlmoHybridConfig": _DELTA,
    "Qwen3_5TextConfig": _DELTA,
    "GraniteMoeHybridConfig": {
        **_MAMBA,
        **_MIXED,
        # Its norm is over all heads, of which ranks have parts.
        "mamba_n_groups": 1,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.5,
    },
    "NemotronHConfig": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "head_dim": 8,
        "ssm_state_size": 12,
        "mamba_num_heads": 8,
        "mamba_head_dim": 6,
        "n_groups": 2,
        "chunk_size": 16,
        # transformers limits steps from below in texts, and not in decodes.
        "time_step_min": 1e-12,
    },
    "BambaConfig": {**_MAMBA, "attn_layer_indices": [2]},
    "FalconH1Config": {**_MAMBA, "mamba_d_ssm": 48, "ssm_multipliers": [1.5, 0.5, 0.7, 1.3, 0.9]},
    "Qwen3_5MoeTextConfig": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 24},
}


def saved(tmp_path: Path, name: str, **changes: Any) -> Any:
    """Save a checkpoint, of a configuration with these changes; returns transformers' model."""
    if not is_known(name):
        pytest.skip("transformers has no such model yet")
    if VERSION < (5, 24) and not has_states(Lfm2ShortConv):
        pytest.skip("models with states need transformers that call our functions, 5.24 for example")
    return save_random(make_config(name, **{**BASE, **HYBRIDS[name], **changes}), tmp_path)


def load(path: Path, **options: Any) -> HPUDuoModel:
    """Serve it in small steps, so that prompts come in chunks."""
    given = {"max_model_len": 64, "max_num_seqs": 3, "block_size": BLOCK, "max_num_batched_tokens": 13}
    return HPUDuoModel.from_pretrained(path, **{**given, **options})
