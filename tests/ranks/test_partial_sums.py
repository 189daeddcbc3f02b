"""Ranks add up to what the whole module computes, or its family is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from hpu_duo.device.ranks import Ranks
from hpu_duo.modeling.attention import attention
from hpu_duo.modeling.loading import build_without_weights
from hpu_duo.modeling.probe import read_layers
from hpu_duo.parallel import RankHeads
from hpu_duo.parallel.share_trial import check_share
from tests.modeling.families import BASE, FAMILIES
from tests.ranks.more_families import SERVED, is_known, tiny
from tests.ranks.test_families import REFUSED
from tests.tiers import crossed


def check(config: Any, size: int) -> None:
    """Check the share of the first rank, without weights."""
    whole = build_without_weights("tiny", config, torch.float32)
    layers, ranks = read_layers(whole), Ranks(0, size)
    heads = [RankHeads.of([range(each.call.num_kv_heads)], each.call.num_heads, ranks) for each in layers]
    check_share("tiny", config, torch.float32, whole, layers, heads, ranks)


def wide_heads() -> LlamaConfig:
    """A model whose heads are together wider than its hidden size, so that shapes tell them apart."""
    return LlamaConfig(**{**BASE, "head_dim": 16})


FEW = ("llama", "gemma2", "gpt_oss", "phi", "cohere", "starcoder2", "qwen3_moe", "smollm3")
FEW_FURTHER = (
    "arcee",
    "exaone4",
    "glm4_moe",
    "gemma4_text, shared keys",
    "gpt_neox, biases",
    "deepseek_v3",
    "laguna",
)


@pytest.mark.parametrize("name", crossed([name for name in FAMILIES if name not in REFUSED], fast=FEW))
def test_families_pass(name: str) -> None:
    check(FAMILIES[name](), 4)


@pytest.mark.parametrize("name", crossed(list(SERVED), fast=FEW_FURTHER))
def test_further_families_pass(name: str) -> None:
    if not is_known(name):
        pytest.skip(f"the installed transformers has no {name}")
    check(tiny(name, SERVED[name]), 4)


class NormOfTheSum(LlamaAttention):
    """Norms what ranks have only a partial sum of."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sub_norm = LlamaRMSNorm(config.hidden_size)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Norm."""
        output, weights = super().forward(*args, **kwargs)
        return self.sub_norm(output), weights


class WithResidual(LlamaAttention):
    """Adds its input, which every rank has whole."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        """Add."""
        output, weights = super().forward(hidden_states, **kwargs)
        return output + hidden_states, weights


class WithBias(LlamaAttention):
    """Adds a bias by a name of its own."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.shift = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add."""
        output, weights = super().forward(*args, **kwargs)
        return output + self.shift, weights


class Halved(LlamaAttention):
    """Halves its output: ranks may each halve what they add."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Halve."""
        output, weights = super().forward(*args, **kwargs)
        return 0.5 * output, weights


class WholeNorm(nn.Module):
    """A norm without a weight, of all that it gets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm."""
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)


class InParts(LlamaAttention):
    """Has places for norms of all heads together, before and behind its attention."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_norm: nn.Module = nn.Identity()
        self.heads_norm: nn.Module = nn.Identity()

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        """Attend without rotary embeddings."""
        kwargs.pop("position_embeddings")
        q = self.q_norm(self.q_proj(hidden_states))
        k, v = self.k_proj(hidden_states), self.v_proj(hidden_states)
        tokens = hidden_states.shape[:-1]
        q, k, v = (each.view(*tokens, -1, self.head_dim).transpose(1, 2) for each in (q, k, v))
        heads, weights = attention(self, q, k, v, scaling=self.scaling, **kwargs)
        return self.o_proj(self.heads_norm(heads.reshape(*tokens, -1))), weights


class NormOfQueries(InParts):
    """Norms the queries of all heads together."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_norm = WholeNorm()


class NormOfHeads(InParts):
    """Norms the outputs of all heads together, with a weight that ranks share."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.heads_norm = LlamaRMSNorm(config.num_attention_heads * self.head_dim)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", [NormOfTheSum, WithResidual, WithBias, NormOfQueries, NormOfHeads])
def test_attention_that_adds_something_else_is_refused(
    kind: type, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaAttention", kind)
    told = rf"'llama' cannot be served by .* what {size} ranks make of model.layers.0.self_attn to add up"
    with pytest.raises(ValueError, match=told):
        check(wide_heads(), size)


@pytest.mark.parametrize("kind", [Halved, InParts])
def test_attention_of_another_kind_that_adds_up_is_served(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaAttention", kind)
    check(wide_heads(), 2)


class SoftmaxOfWidth(LlamaMLP):
    """Compares all of its width."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Choose."""
        return self.down_proj(self.gate_proj(x).softmax(dim=-1) * self.up_proj(x))


def test_an_mlp_that_compares_all_of_its_width_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaMLP", SoftmaxOfWidth)
    with pytest.raises(ValueError, match=r"what 2 ranks make of model.layers.0.mlp to add up"):
        check(wide_heads(), 2)


class Wrapped(nn.Module):
    """Attention one level below the decoder layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Attend."""
        return self.inner(*args, **kwargs)


class DeeperLayer(LlamaDecoderLayer):
    """Has an MLP that is no neighbour of the attention."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = Wrapped(self.self_attn)


def test_weights_that_ranks_share_and_nobody_sums_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", DeeperLayer)
    told = r"'llama' cannot be served by .* whose outputs are summed, got model.layers.0.mlp.gate_proj.weight"
    with pytest.raises(ValueError, match=told):
        check(wide_heads(), 2)
