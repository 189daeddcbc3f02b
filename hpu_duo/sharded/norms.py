"""Formulas of norms over a dimension that ranks share, found by a trial of the module itself."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from hpu_duo.modeling.refusal import refusing

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""Names by which families keep the epsilon."""
_OFFSETS = (0.0, 1.0)
_NUM_TOKENS = 16
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
"""Relative errors of a formula: roundings of the mean and of the product."""


@dataclass(frozen=True)
class NormFormula:
    """A root-mean-square norm: ``(offset + weight) * x / sqrt(mean(x ** 2) + epsilon)``.

    Attributes:
        epsilon: added to the mean.
        offset: added to the weight.
        rounds_first: whether ``x`` is rounded to its type before it meets the weight, and not after.
    """

    epsilon: float
    offset: float = 0.0
    rounds_first: bool = False

    @classmethod
    def of(cls, norm: nn.Module) -> NormFormula:
        """Find the formula of a module by a trial with random weights; its own need not be there.

        Raises:
            ValueError: it has none of this kind, or no epsilon by a usual name; the message names its class.
        """
        epsilon = next((x for name in _EPSILONS if (x := getattr(norm, name, None)) is not None), None)
        if epsilon is None:
            raise _refused(norm, f"an epsilon by one of the names {', '.join(_EPSILONS)}, got none")
        formulas = [cls(float(epsilon), *each) for each in product(_OFFSETS, (False, True))]
        for dtype, most in _TOLERANCE.items():
            errors = _errors(norm, formulas, dtype)
            formulas = [formula for formula in formulas if errors[formula] <= most]
            if not formulas:
                raise _refused(
                    norm, "weight * x or (1 + weight) * x of a root-mean-square norm, got another formula"
                )
        # In bfloat16 the formulas that are left differ in what is rounded.
        return min(formulas, key=errors.__getitem__)

    def apply(self, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return the norm of a part of a dimension.

        Args:
            x: the part, ``[..., W]``.
            weight: of the part, ``[W]``.
            mean: mean square over the whole dimension, ``[..., 1]`` in float32.
        """
        normed = x.float() * torch.rsqrt(mean + self.epsilon)
        if self.rounds_first:
            normed = normed.to(x.dtype)
        factor = weight.to(normed.dtype) + self.offset if self.offset else weight
        return (factor * normed).to(x.dtype)


def _errors(norm: nn.Module, formulas: list[NormFormula], dtype: torch.dtype) -> dict[NormFormula, float]:
    """The largest relative error of each formula in a run of the module on the host, in one type."""
    generator = torch.Generator().manual_seed(0)
    trial = copy.deepcopy(norm)
    for name, parameter in norm.named_parameters():
        owner, _, leaf = name.rpartition(".")
        drawn = torch.rand(parameter.shape, generator=generator).add_(0.25).to(dtype)
        setattr(trial.get_submodule(owner), leaf, nn.Parameter(drawn, requires_grad=False))
    weight = trial.get_parameter("weight")
    # From values that the epsilon outweighs to those that outweigh it.
    sizes = torch.logspace(-1, 2, _NUM_TOKENS) * formulas[0].epsilon ** 0.5
    x = (torch.randn(_NUM_TOKENS, len(weight), generator=generator) * sizes[:, None]).to(dtype)
    with torch.inference_mode(), refusing(norm):
        expected = trial(x).float()
        mean = x.float().square().mean(dim=-1, keepdim=True)
        return {
            each: float(((each.apply(x, weight, mean).float() - expected) / expected).abs().max())
            for each in formulas
        }


def _refused(norm: nn.Module, what: str) -> ValueError:
    name = type(norm).__name__
    return ValueError(f"{name} over all heads together cannot be served by several ranks: expected {what}")
