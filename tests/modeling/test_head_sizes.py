"""Models whose head sizes differ between layers."""

from pathlib import Path

import pytest

from hpu_duo import HPUDuoModel
from hpu_duo.heads import HeadPattern
from hpu_duo.planning.read_model import read_model
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

SIZES = [8, 8, 8, 16, 8, 16]
"""More layers of one kind before the first of the other than the trial at load runs."""

pytestmark = pytest.mark.skipif(not is_known("Gemma4TextConfig"), reason="transformers has no such model yet")


@pytest.mark.parametrize("streams", [False, True])
def test_layers_with_heads_of_two_sizes_are_served_as_transformers_runs_them(
    tmp_path: Path, streams: bool
) -> None:
    kinds = ["full_attention" if size == 16 else "sliding_attention" for size in SIZES]
    config = make_config(
        "Gemma4TextConfig",
        **{
            **BASE,
            "num_hidden_layers": len(SIZES),
            "layer_types": kinds,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
        },
    )
    model = save_random(config, tmp_path)
    assert [layer.head_dim for layer in read_model(tmp_path).layers] == SIZES
    # Rings that hold whole requests: heads change places, and nothing else changes.
    pattern = HeadPattern([[0.0, 1.0]] * len(SIZES), sink=2, recent=62).binarise(threshold=0.5)
    served = HPUDuoModel.from_pretrained(
        tmp_path, pattern=pattern if streams else None, max_model_len=64, max_num_seqs=2, block_size=BLOCK
    )
    assert [spec.head_dim for spec in served.engine.runner.model.specs] == SIZES
    for prompt in prompts_of([1, 20, 40]):
        row = served.generate([prompt], max_new_tokens=8)[0, len(prompt) :].tolist()
        assert row == greedy(model, prompt, 8)
