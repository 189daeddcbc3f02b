"""Models whose last layers attend to keys and values of earlier ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpu_duo import HPUDuoModel
from hpu_duo.heads import HeadPattern
from tests.modeling.families import (
    BASE,
    BLOCK,
    WINDOW,
    greedy,
    is_known,
    make_config,
    prompts_of,
    save_random,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma3nTextConfig": {"laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "Gemma4TextConfig": {"global_head_dim": 16, "use_double_wide_mlp": True},
}
SHARED = {
    **BASE,
    "num_kv_shared_layers": 2,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": BASE["vocab_size"],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_that_share_keys_and_values_are_served_as_transformers_runs_them(
    tmp_path: Path, name: str
) -> None:
    if not is_known(name):
        pytest.skip("transformers has no such model yet")
    model = save_random(make_config(name, **SHARED, **FAMILIES[name]), tmp_path)
    options: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "block_size": BLOCK}
    served = HPUDuoModel.from_pretrained(tmp_path, **options)
    for prompt in prompts_of([1, 20, 40]):
        rows = served.generate([prompt], max_new_tokens=8)
        assert isinstance(rows, torch.Tensor)
        assert rows[0, len(prompt) :].tolist() == greedy(model, prompt, 8)
    pattern = HeadPattern(np.array([[0.0, 1.0]] * 4), sink=2, recent=14).binarise(threshold=0.5)
    with pytest.raises(ValueError, match="every layer to compute its own keys and values"):
        HPUDuoModel.from_pretrained(tmp_path, pattern=pattern, **options)
