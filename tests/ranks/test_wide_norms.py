"""Norms over all heads together: ranks compute what the module computes, or it is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from hpu_duo.parallel import modules
from hpu_duo.parallel.modules import NormFormula, RMSNormOverRanks, wide_norms
from tests.ranks.threads import ThreadRanks

HEAD_DIM, WIDTH, EPSILON = 4, 24, 1e-3
SERVED = {
    "weight * x, rounded first": lambda: LlamaRMSNorm(WIDTH, EPSILON),
    "weight * x, rounded last": lambda: Olmo2RMSNorm(WIDTH, EPSILON),
    "(1 + weight) * x": lambda: GemmaRMSNorm(WIDTH, EPSILON),
    "torch": lambda: nn.RMSNorm(WIDTH, EPSILON),
    "gated inputs": lambda: FalconH1RMSNormGated(WIDTH, EPSILON, norm_before_gate=False),
    "gated results": lambda: FalconH1RMSNormGated(WIDTH, EPSILON, norm_before_gate=True),
    "gated inputs, rounded first": lambda: Zamba2RMSNormGated(WIDTH, WIDTH, EPSILON),
}


class Other(nn.Module):
    """A norm of another formula."""

    def __init__(self, formula: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.formula, self.variance_epsilon = formula, EPSILON

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Norm."""
        mean = x.float().square().mean(dim=-1, keepdim=True)
        match self.formula:
            case "another gate":
                normed = (self.weight * x * torch.rsqrt(mean + self.variance_epsilon)).to(x.dtype)
                return normed if gate is None else normed * gate.sigmoid()
            case "epsilon outside the root":
                return (self.weight * x / (mean.sqrt() + self.variance_epsilon)).to(x.dtype)
            case "another epsilon":
                return (self.weight * x * torch.rsqrt(mean + 2 * self.variance_epsilon)).to(x.dtype)
            case "(2 + weight) * x":
                return ((2 + self.weight) * x * torch.rsqrt(mean + self.variance_epsilon)).to(x.dtype)
        heads = x.view(*x.shape[:-1], -1, HEAD_DIM)
        mean = heads.float().square().mean(dim=-1, keepdim=True)
        return self.weight * (heads * torch.rsqrt(mean + self.variance_epsilon)).view_as(x)


REFUSED = {
    "a layer norm": lambda: nn.LayerNorm(WIDTH, EPSILON),
    "a layer norm without a bias": lambda: nn.LayerNorm(WIDTH, EPSILON, bias=False),
    "no epsilon": lambda: nn.RMSNorm(WIDTH),
    **{
        formula: lambda formula=formula: Other(formula)
        for formula in (
            *("epsilon outside the root", "another epsilon", "(2 + weight) * x", "weights of heads"),
            "another gate",
        )
    },
}


def layer_with(norm: nn.Module) -> Any:
    attention = nn.Module()
    attention.q_norm = norm
    return SimpleNamespace(attention=attention, call=SimpleNamespace(head_dim=HEAD_DIM))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SERVED)
def test_ranks_compute_what_the_norm_computes(
    name: str, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = SERVED[name]().to(dtype)
    nn.init.normal_(norm.weight, generator=generator)
    formula = wide_norms(layer_with(norm))["q_norm"]
    ranks = ThreadRanks(size)
    monkeypatch.setattr(modules, "sum_over_ranks", ranks.sum)
    # Rows as small as the epsilon as well.
    x = (torch.randn(64, WIDTH, generator=generator) * torch.logspace(-3, 1, 64)[:, None]).to(dtype)
    given = [x]
    if name.startswith("gated"):
        given.append(torch.randn(x.shape, generator=generator).to(dtype))

    def of_rank(rank: int) -> torch.Tensor:
        weight = nn.Parameter(norm.weight.detach().chunk(size)[rank])
        parts = [each.chunk(size, dim=-1)[rank] for each in given]
        own: torch.Tensor = RMSNormOverRanks(weight, formula, size, "")(*parts)
        return own

    with torch.no_grad():
        got, expected = torch.cat(ranks.run(of_rank), dim=-1), norm(*given)
    assert got.dtype == dtype
    # The order of a sum may change a bfloat16 of few, and another formula changes many.
    close = torch.isclose(got, expected, rtol=1e-5, atol=0)
    assert close.float().mean() > (0.99 if dtype is torch.bfloat16 else 0.9999)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", REFUSED)
def test_a_norm_of_another_formula_is_refused_by_name(name: str) -> None:
    norm = REFUSED[name]()
    message = f"^{type(norm).__name__} over all heads together cannot be served by several ranks: expected"
    with pytest.raises(ValueError, match=message):
        wide_norms(layer_with(norm))


def test_a_norm_is_read_without_its_weights() -> None:
    with torch.device("meta"):
        norm = GemmaRMSNorm(WIDTH, EPSILON)
    assert wide_norms(layer_with(norm)) == {"q_norm": NormFormula(EPSILON, offset=1.0)}
    assert norm.weight.is_meta, "nothing is left behind in the model"


def test_norms_of_single_heads_are_not_summed() -> None:
    assert wide_norms(layer_with(LlamaRMSNorm(HEAD_DIM))) == {}
    assert wide_norms(layer_with(nn.Identity())) == {}
