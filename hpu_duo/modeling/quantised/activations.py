"""Inputs of linear layers that are rounded to int8 or fp8 before the product, as a checkpoint says.

Shapes: K inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from hpu_duo.modeling.quantised.format import Activations
from hpu_duo.modeling.quantised.linear import Keeps, QuantisedLinear, round_inputs


class RoundedLinear(nn.Module):
    """A linear layer whose inputs are rounded first.

    Args:
        activations: the rounding.
        scale: see ``round_inputs``.
        linear: of plain weights, or of codes.
    """

    scale: torch.Tensor | None

    def __init__(self, activations: Activations, scale: float | None, linear: nn.Module) -> None:
        super().__init__()
        self.activations, self.linear = activations, linear
        self.register_buffer("scale", None if scale is None else torch.tensor(scale), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(round_inputs(x, self.activations, self.scale))
        return y

    def extra_repr(self) -> str:
        return f"inputs in {self.activations.kind}"


def separate_inputs(
    model: nn.Module, is_whole: Callable[[QuantisedLinear], bool], keeps: Keeps, dtype: torch.dtype
) -> None:
    """Replace layers whose inputs are rounded by ``RoundedLinear``, in place.

    Args:
        is_whole: whether a kernel rounds the inputs of a layer itself: it stays as it is.
        keeps: which weights stay codes.
        dtype: of the plain weights of all others.
    """
    targets = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, QuantisedLinear) and child.activations is not None and not is_whole(child)
    ]
    for module, name in targets:
        child = getattr(module, name)
        stored = replace(child.stored, activations=None, input_scale=None)
        inner = (
            QuantisedLinear(child.in_features, child.out_features, child.bias, stored)
            if keeps(stored)
            else child.plain(stored, dtype)
        )
        setattr(module, name, RoundedLinear(child.activations, child.stored.input_scale, inner))
