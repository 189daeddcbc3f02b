"""Rotary embeddings whose frequencies transformers changes with the length of a sequence."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hpu_duo.modeling.rope import fix_frequencies, positions_served
from tests.modeling.families import BASE, IS_5, LENGTH_DEPENDENT

ROPES = pytest.mark.parametrize("rope", LENGTH_DEPENDENT, ids=lambda rope: str(rope["rope_type"]))


def random_model(rope: dict[str, Any]) -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {**BASE, "num_hidden_layers": 1, "max_position_embeddings": 96}
    if "original_max_position_embeddings" in rope:
        # Before 5, transformers looks for it here.
        sizes["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return LlamaForCausalLM(LlamaConfig(**sizes, **{"rope_parameters" if IS_5 else "rope_scaling": rope}))


@torch.no_grad()
def logits(model: LlamaForCausalLM, length: int) -> torch.Tensor:
    out: torch.Tensor = model(torch.arange(length)[None] % 90 + 3).logits
    return out


@ROPES
def test_fixed_frequencies_are_those_of_every_length_that_is_served(rope: dict[str, Any]) -> None:
    fixed, model = random_model(rope), random_model(rope)
    fix_frequencies(fixed)
    for length in (1, 40, positions_served(model.config)):
        assert torch.equal(logits(fixed, length), logits(model, length))
    beyond = positions_served(model.config) + 8
    assert not torch.allclose(logits(fixed, beyond), logits(model, beyond))


@ROPES
def test_a_model_that_has_seen_a_longer_text_gets_the_frequencies_of_short_ones_back(
    rope: dict[str, Any],
) -> None:
    model = random_model(rope)
    expected = logits(model, 20)
    logits(model, positions_served(model.config) + 8)
    fix_frequencies(model)
    assert torch.equal(logits(model, 20), expected)


def test_other_embeddings_are_left_alone() -> None:
    model = random_model({"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0})
    before = model.model.rotary_emb.inv_freq
    fix_frequencies(model)
    assert model.model.rotary_emb.inv_freq is before
    assert model.model.rotary_emb.rope_type == "linear"
