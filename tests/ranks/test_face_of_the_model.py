"""A model that ranks share looks to callers like the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpu_duo import HPUDuoModel
from hpu_duo.modeling.loading import read_config
from hpu_duo.startup.warm_up_estimate import configuration_of
from tests.modeling.families import BLOCK, Zoo, prompts_of

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_the_configuration_and_scores_are_those_of_the_whole_model(zoo: Zoo) -> None:
    path, prompts = zoo.load("llama")[1], prompts_of((5, 5), seed=2)
    options: Any = {"device": "cpu", "dtype": "float32", "block_size": BLOCK, "num_blocks": 16}
    config = read_config(path)
    # The last token is rank 1's.
    asked: Any = {
        "logit_bias": {config.vocab_size - 1: 100.0},
        "max_new_tokens": 3,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    found = []
    for size in (1, 2):
        model = HPUDuoModel.from_pretrained(path, tensor_parallel_size=size, **options)
        for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
            assert getattr(model.config, name) == getattr(config, name)
        done: Any = model.generate(prompts, **asked)
        found.append(model.compute_transition_scores(done.sequences, done.scores, normalize_logits=True))
        assert done.sequences[:, -3:].unique().tolist() == [config.vocab_size - 1]
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    # Graphs are those of a share.
    assert configuration_of(model.engine)["model.num_attention_heads"] * 2 == config.num_attention_heads
