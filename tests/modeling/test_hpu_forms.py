"""Forms for an HPU's graphs of what transformers' modules compute."""

from typing import Any

import pytest
import torch
from torch import nn

from hpu_duo.modeling.hpu_forms import DenseWrites, RealPairs, use_hpu_forms
from tests.modeling.families import BASE, is_known, make_config


def test_dense_writes_of_a_router_are_its_scattered_ones() -> None:
    scores, index = torch.randn(5, 8), torch.randint(8, (5, 3))
    expected = scores.clone().scatter_(1, index, 1)
    with DenseWrites():
        found = scores.scatter_(1, index, 1)
    assert found is scores
    assert torch.equal(found, expected)


def test_a_sum_with_a_part_writes_the_whole() -> None:
    x, y = torch.randn(4, 3), torch.randn(2, 3)
    expected = x.clone()
    expected[1:3] += y
    before, view = x, x[1:3]
    with DenseWrites():
        x[1:3] += y
        view += 0
    assert x is before
    assert torch.equal(x, expected)


def test_products_of_complex_numbers_are_those_of_their_parts() -> None:
    x, angle = torch.randn(1, 3, 5, 8), torch.randn(1, 5, 4)

    def turned() -> torch.Tensor:
        turns = torch.polar(torch.full_like(angle, 2), angle) * 1.5
        numbers = torch.view_as_complex(x.reshape(1, 3, 5, 4, 2))
        return torch.view_as_real(numbers * turns.unsqueeze(1)).flatten(3)

    expected = turned()
    with RealPairs():
        found = turned()
        torch.testing.assert_close(x * 2, x + x)
    torch.testing.assert_close(found, expected)


def test_modules_of_one_class_stay_of_one_class() -> None:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding

    config = make_config("DeepseekV2Config", **BASE)
    modules = nn.ModuleList(DeepseekV2RotaryEmbedding(config) for _ in range(2))
    assert use_hpu_forms(modules) == 2
    assert type(modules[0]) is type(modules[1])
    assert not modules[0](torch.ones(1), torch.arange(4)[None]).is_complex()


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inv_freq = torch.ones(4)

    def recomposition_frequencies(self, freq: torch.Tensor) -> torch.Tensor:
        return torch.cat([freq[0], -freq[1]], dim=-1)


def test_rotary_positions_of_text_are_those_of_transformers() -> None:
    if not is_known("Qwen3_5TextConfig"):
        pytest.skip("transformers has no such model yet")
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    config = make_config("Qwen3_5TextConfig", **{**BASE, "head_dim": 256})
    module: Any = Qwen3_5TextRotaryEmbedding(config)
    x, positions = torch.randn(1, 40, 8), torch.arange(40)[None]
    expected = [each.clone() for each in module(x, positions)]
    with pytest.MonkeyPatch.context() as patch:
        assert use_hpu_forms(module) == 1
        patch.delattr(type(module), "recomposition_frequencies")
        found = module(x, positions)
    assert expected[0].shape == (1, 40, 64)
    for ours, theirs in zip(found, expected):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_activations_are_those_of_transformers(dtype: torch.dtype) -> None:
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

    changes = {"activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]}
    config = make_config("Gemma3nTextConfig", **{**BASE, **changes})
    sparse, dense = (Gemma3nTextMLP(config, layer_idx=layer).to(dtype) for layer in range(2))
    x = torch.randn(3, 7, BASE["hidden_size"]).to(dtype)
    expected = sparse(x)
    assert [use_hpu_forms(module) for module in (sparse, dense)] == [1, 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Gemma3nTextMLP, "_gaussian_topk")
        assert torch.equal(sparse(x), expected)


def test_modules_with_other_results_keep_their_code() -> None:
    module = Rotary()
    assert use_hpu_forms(module) == 0
    assert module.recomposition_frequencies(torch.ones(3, 4)).min() == -1
