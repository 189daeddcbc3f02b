"""Tiny random checkpoints of families whose layers have states beside keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpu_duo import HPUDuoModel
from tests.modeling.families import BASE, BLOCK, WINDOW, is_known, make_config, save_random

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
    "Qwen3_5MoeTextConfig": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 24},
}


def saved(tmp_path: Path, name: str) -> Any:
    """Save a checkpoint; returns transformers' model."""
    if not is_known(name):
        pytest.skip("transformers has no such model yet")
    return save_random(make_config(name, **{**BASE, **HYBRIDS[name]}), tmp_path)


def load(path: Path, **options: Any) -> HPUDuoModel:
    """Serve it in small steps, so that prompts come in chunks."""
    given = {"max_model_len": 64, "max_num_seqs": 3, "block_size": BLOCK, "max_num_batched_tokens": 13}
    return HPUDuoModel.from_pretrained(path, **{**given, **options})
