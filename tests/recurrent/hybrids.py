"""Tiny random checkpoints of families whose layers have states beside keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpu_duo import HPUDuoModel
from tests.modeling.families import BASE, BLOCK, is_known, make_config, save_random

HYBRIDS: dict[str, dict[str, Any]] = {
    "Lfm2Config": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
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
