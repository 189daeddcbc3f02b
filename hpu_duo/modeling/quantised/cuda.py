"""Linear layers of codes by our Triton kernels on CUDA devices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hpu_duo.modeling.quantised.format import Activations
from hpu_duo.modeling.quantised.linear import QuantisedLinear
from hpu_duo.modeling.quantised.weight import FP8_MAX, NIBBLE, QuantisedWeight, order_of_groups
from kernels_ref.formats.fp8 import Fp8
from kernels_ref.formats.int4 import Int4
from kernels_ref.formats.int8 import Int8
from kernels_ref.triton import availability, operators
from kernels_ref.triton.launch import KINDS, LEAST_CODES

KERNEL = "Triton, codes read as stored"
"""Name of the kernels in reports."""


def can_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on a device, with inputs of a dtype."""
    return dtype in availability.DTYPES and availability.problem(device) is None


def fits(stored: QuantisedWeight) -> bool:
    """Whether the kernels multiply plain inputs, or those of a constant scale, with a weight."""
    has_whole_groups = stored.scales.shape[1] == 1 or stored.block[1] % LEAST_CODES == 0
    has_known_range = stored.input_scale is None or stored.largest == FP8_MAX
    return has_whole_groups and has_known_range and order_of_groups(stored) is not False


def rounds_inputs(stored: QuantisedWeight) -> bool:
    """Whether the kernels round the inputs of a weight, and multiply codes with codes.

    Both are int8 or e4m3, and no group of inputs ends within a tile.
    """
    inputs, num_inputs = stored.activations, stored.shape[1]
    kind = "fp8" if inputs is None else inputs.kind
    has_zeros = isinstance(stored.zeros, torch.Tensor) or stored.zeros != 0
    groups = {num_inputs if inputs is None or inputs.group is None else inputs.group}
    if stored.scales.shape[1] > 1:
        groups.add(stored.block[1])
    return (
        (stored.codes.dtype == (torch.int8 if kind == "int8" else torch.float8_e4m3fn) and fits(stored))
        and (not has_zeros and stored.bits != NIBBLE and stored.group_of is None)
        and (
            groups == {num_inputs}
            or all(num_inputs % each == 0 and each % LEAST_CODES == 0 for each in groups)
        )
    )


def _is_rounded(stored: QuantisedWeight) -> bool:
    return stored.activations is not None or stored.input_scale is not None


class TritonLinear(nn.Module):
    """A ``QuantisedLinear`` whose codes our kernels read.

    Args:
        layer: ``fits``, and if its inputs are rounded, ``rounds_inputs``.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    input_scale: torch.Tensor | None
    bias: nn.Parameter | None

    def __init__(self, layer: QuantisedLinear) -> None:
        super().__init__()
        stored, order = layer.stored, order_of_groups(layer.stored)
        assert order is None or isinstance(order, torch.Tensor), "the weight fits"
        self.in_features, self.out_features, self.label = layer.in_features, layer.out_features, stored.label
        self.register_parameter("bias", layer.bias)
        codes = stored.codes
        if order is not None:
            codes = stored.select(1, order).codes
        kind = Fp8 if codes.is_floating_point() else Int4 if stored.bits == NIBBLE else Int8
        self._kind = KINDS[kind]
        zeros = stored.zeros if isinstance(stored.zeros, torch.Tensor) else None
        if isinstance(stored.zeros, int) and stored.zeros != 0:
            zeros = torch.full_like(stored.scales, stored.zeros, dtype=torch.uint8)
        self.block = stored.block if stored.scales.shape[1] > 1 else (stored.block[0], self.in_features)
        inputs = stored.activations or (None if stored.input_scale is None else Activations("fp8", True))
        self.rounded_inputs = 0 if inputs is None else inputs.group or self.in_features
        if inputs is not None:
            self.label = f"{self.label}, inputs of {inputs.kind}"
        for name, table in (
            ("codes", codes.view(torch.uint8) if kind is Fp8 else codes),
            ("scales", stored.scales),
            ("zeros", zeros),
            ("order", order),
            ("input_scale", None if stored.input_scale is None else torch.tensor(stored.input_scale)),
        ):
            self.register_buffer(name, None if table is None else table.contiguous(), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TritonLinear:
        """Move the buffers, and leave them as they are, whatever the dtype of a model becomes."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = getattr(self, name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        y: torch.Tensor = operators.linear_of_codes(
            *(x, self.codes, self.scales, self.zeros, self.bias, self.input_scale),
            *(self.out_features, *self.block, self._kind, self.rounded_inputs),
        )
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.label}"


def use_kernels(model: nn.Module) -> int:
    """Replace the layers of codes that our kernels read, in place; returns their number."""
    targets = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, QuantisedLinear)
        and (rounds_inputs(child.stored) if _is_rounded(child.stored) else fits(child.stored))
    ]
    for module, name in targets:
        setattr(module, name, TritonLinear(getattr(module, name)))
    return len(targets)
