"""Linear layers whose weight stays codes in memory or whose inputs are rounded, and the choice which do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn

from hpu_duo.modeling.quantised.format import Activations
from hpu_duo.modeling.quantised.inc import IncScales
from hpu_duo.modeling.quantised.weight import FP8_MAX, QuantisedWeight

_CODES = MappingProxyType({"int8": (-128.0, 127.0), "fp8": (-FP8_MAX, FP8_MAX)})
"""The least and the largest code of inputs."""
_LEAST = 2.0**-100
"""Least size of a token's largest element, so that zeros have a scale."""


def round_inputs(x: torch.Tensor, activations: Activations, scale: torch.Tensor | None) -> torch.Tensor:
    """Round inputs ``[..., K]``: ``x / scale`` to the nearest code, half a step to even, times ``scale``.

    Computed in float32, with a result in the dtype of ``x``.

    Args:
        activations: number format and size of groups.
        scale: of all inputs, one element; None = the largest size of each token, or group, over the largest
            code.
    """
    (least, most), group = _CODES[activations.kind], activations.group
    wide = x.float() if group is None else x.float().unflatten(-1, (-1, group))
    if scale is None:
        scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=_LEAST) / most
    codes = wide / scale
    if activations.kind == "int8":
        codes = codes.round().clamp(least, most)
    else:
        codes = codes.clamp(least, most).to(torch.float8_e4m3fn).float()
    return (codes * scale).to(x.dtype).view(x.shape)


class QuantisedLinear(nn.Module):
    """``nn.Linear`` with a quantised weight, which is dequantised to the dtype of the inputs at each use.

    This is the reference of kernels that read codes. It takes the memory of the codes, and of one plain
    weight while it runs. Inputs with a constant scale are rounded to fp8 first, and
    inputs that the checkpoint says to round are.

    Args:
        in_features, out_features: sizes of inputs and outputs.
        bias: ``[out_features]``, or None.
        stored: the weight; None = it is set by ``fill``, before the first use.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_of: torch.Tensor | None
    input_scale: torch.Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: nn.Parameter | None = None,
        stored: QuantisedWeight | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_parameter("bias", bias)
        if stored is not None:
            self.fill(stored)

    def fill(self, stored: QuantisedWeight) -> None:
        """Set the weight, and the sizes of inputs and outputs to its own."""
        self.out_features, self.in_features = stored.shape
        zeros = stored.zeros
        self.zero = zeros if isinstance(zeros, int) else 0
        self.bits, self.block = stored.bits, stored.block
        self.register_buffer("codes", stored.codes, persistent=False)
        self.register_buffer("scales", stored.scales, persistent=False)
        self.register_buffer("zeros", zeros if isinstance(zeros, torch.Tensor) else None, persistent=False)
        self.register_buffer("group_of", stored.group_of, persistent=False)
        scale = stored.input_scale
        self.register_buffer("input_scale", None if scale is None else torch.tensor(scale), persistent=False)
        self.largest, self.activations = stored.largest, stored.activations

    @property
    def stored(self) -> QuantisedWeight:
        """The weight."""
        zeros: torch.Tensor | int = self.zero if self.zeros is None else self.zeros
        shape, scale = (self.out_features, self.in_features), self.input_scale
        return QuantisedWeight(
            *(self.codes, self.scales, shape, self.block, zeros, self.bits, self.group_of),
            *(None if scale is None else float(scale), self.largest, self.activations),
        )

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the plain weight ``[out_features, in_features]``."""
        return self.stored.dequantised(dtype)

    def select(self, dim: int, index: torch.Tensor) -> None:
        """Keep outputs (``dim`` 0, of the bias too) or inputs (1) in the order of ``index``, in place."""
        self.fill(self.stored.select(dim, index))
        if dim == 0 and self.bias is not None:
            self.bias.data = self.bias.data[index.to(self.bias.device)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.activations is not None:
            x = round_inputs(x, self.activations, self.input_scale)
        elif self.input_scale is not None:
            codes = (x.float() / self.input_scale).clamp(-self.largest, self.largest)
            x = (codes.to(torch.float8_e4m3fn).float() * self.input_scale).to(x.dtype)
        return nn.functional.linear(x, self.dequantised(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    @classmethod
    def like(cls, linear: nn.Linear) -> QuantisedLinear:
        """Return a layer without a weight in place of a plain one, with its bias."""
        return cls(linear.in_features, linear.out_features, linear.bias)

    def plain(self, stored: QuantisedWeight, dtype: torch.dtype) -> nn.Linear:
        """Return a plain layer with the bias of this one and a dequantised weight."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(stored.dequantised(dtype), requires_grad=False)
        linear.register_parameter("bias", self.bias)
        return linear.eval()


Keeps = Callable[[QuantisedWeight], bool]
"""Whether a weight stays codes."""


def _never(stored: QuantisedWeight) -> bool:
    return False


@dataclass(frozen=True)
class WeightExecution:
    """Selection of the weights that are codes in memory, quantised ones and rounded plain ones.

    Attributes:
        keeps: whether a weight stays codes; all others are dequantised at load.
        rounding: format that plain weights of linear layers are rounded to, a name of
            ``hpu_duo.modeling.quantised.rounding.FORMATS``, or "inc"; None = they stay plain.
        scales: of weights and inputs, for "inc".
        rounds_inputs: whether inputs are rounded where the checkpoint says so.
    """

    keeps: Keeps = _never
    rounding: str | None = None
    scales: IncScales | None = None
    rounds_inputs: bool = False


DEQUANTISED = WeightExecution()
"""Plain weights only."""


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
