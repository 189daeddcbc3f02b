"""Linear layers whose codes are laid out once for our kernel of x86 processors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from hpu_duo.modeling.attention import AttentionLayer
from hpu_duo.modeling.quantised.cuda import KERNEL as CUDA_KERNEL
from hpu_duo.modeling.quantised.cuda import TritonLinear
from hpu_duo.modeling.quantised.hpu import KERNEL as HPU_KERNEL
from hpu_duo.modeling.quantised.hpu import HPUFp8Linear, HPUInt4Linear
from hpu_duo.modeling.quantised.linear import QuantisedLinear
from hpu_duo.modeling.quantised.weight import NIBBLE, QuantisedWeight, order_of_groups, unpack_nibbles
from hpu_duo.modeling.recurrent import RecurrentStates
from kernels_ref.x86 import int8
from kernels_ref.x86 import quantised as kernel
from kernels_ref.x86.linear import pack_bias

KERNEL = "x86, codes read as stored"
"""Name of the kernel in reports."""


class Arena(Protocol):
    """Memory that pieces are taken from."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the next piece, as zeros."""
        ...


def fits(stored: QuantisedWeight, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies activations of a dtype with a weight on this machine."""
    return (
        kernel.fits(dtype, stored.scales.shape[1], stored.block[1]) and order_of_groups(stored) is not False
    )


class PanelQuantisedLinear(nn.Module):
    """A ``QuantisedLinear`` whose codes are in panels for our kernel.

    Args:
        layer: ``fits``.
        memory: receives the panels; see ``num_bytes``.
        live: as of ``PanelLinear``.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bias: torch.Tensor | None
    order: torch.Tensor | None
    live: torch.Tensor | None

    def __init__(self, layer: QuantisedLinear, memory: Arena, live: torch.Tensor | None) -> None:
        super().__init__()
        stored = layer.stored
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.label = stored.label
        order = order_of_groups(stored)
        assert order is None or isinstance(order, torch.Tensor), "the weight fits"
        num_groups = stored.scales.shape[1]
        self.group = stored.block[1] if num_groups > 1 else kernel.padded(self.in_features)
        bias = None if layer.bias is None else pack_bias(layer.bias.detach())
        for name, tensor in (
            ("codes", _packed(stored, order, memory)),
            ("scales", kernel.pack_table(_by_output(stored.scales, stored))),
            ("zeros", _zeros(stored)),
            ("bias", bias),
            ("order", order),
            ("live", live),
        ):
            self.register_buffer(name, tensor, persistent=False)
        self._operator = kernel.operator()

    @staticmethod
    def num_bytes(layer: QuantisedLinear) -> int:
        """Bytes of the packed codes."""
        shape, dtype = _layout(layer.stored)
        return math.prod(shape) * dtype.itemsize

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> PanelQuantisedLinear:
        """Leave the buffers as they are, whatever the dtype of their inputs."""
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Only [1, tokens, features] has the tokens of the step in their order.
        live = self.live if x.dim() == 3 and x.shape[0] == 1 else None
        if self.order is not None:
            x = x.index_select(-1, self.order)
        return self._operator(
            x, self.codes, self.scales, self.zeros, self.bias, self.out_features, self.group, live
        )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.label} in panels"


def _layout(stored: QuantisedWeight) -> tuple[tuple[int, ...], torch.dtype]:
    if stored.bits == NIBBLE:
        return kernel.nibbles_shape(*stored.shape), torch.int16
    is_fp8 = stored.codes.is_floating_point()
    return kernel.bytes_shape(*stored.shape), stored.codes.dtype if is_fp8 else torch.int8


def _packed(stored: QuantisedWeight, order: torch.Tensor | None, memory: Arena) -> torch.Tensor:
    shape, dtype = _layout(stored)
    out = memory.take(shape, dtype)
    codes = stored.codes
    if stored.bits == NIBBLE:
        codes = unpack_nibbles(codes, stored.shape[1])
    if order is not None:
        codes = codes[:, order]
    if stored.bits == NIBBLE:
        kernel.pack_nibbles(codes, out)
    else:
        # Unsigned bytes less 128 are signed ones.
        kernel.pack_bytes(codes ^ 128 if codes.dtype == torch.uint8 else codes, out)
    return out


def _middle(stored: QuantisedWeight) -> int:
    """The code that the kernel takes for zero."""
    if stored.bits == NIBBLE:
        return 8
    return 128 if stored.codes.dtype == torch.uint8 else 0


def _zeros(stored: QuantisedWeight) -> torch.Tensor | None:
    zeros, middle = stored.zeros, _middle(stored)
    if isinstance(zeros, int):
        if zeros == middle:
            return None
        zeros = torch.full(stored.scales.shape, zeros, dtype=torch.int16)
    beyond = (zeros.to(torch.int16) - middle).to(torch.int8)
    return kernel.pack_table(_by_output(beyond, stored)) if bool(beyond.any()) else None


def _by_output(table: torch.Tensor, stored: QuantisedWeight) -> torch.Tensor:
    """A row for each output of a table that has one for some neighbours."""
    num_outputs, rows = stored.shape[0], stored.block[0]
    return table if rows == 1 else table.repeat_interleave(rows, 0)[:num_outputs]


def multiplies_int8(layer: QuantisedLinear, dtype: torch.dtype) -> bool:
    """Whether our kernel multiplies the codes of a layer with inputs of a dtype that it rounds to int8."""
    stored, inputs = layer.stored, layer.activations
    if inputs is None or inputs.kind != "int8" or inputs.group is not None:
        return False
    is_plain = stored.scales.shape[1] == 1 and stored.group_of is None
    has_zeros = isinstance(stored.zeros, torch.Tensor) or stored.zeros != 0
    return (
        is_plain and not has_zeros and stored.codes.dtype == torch.int8 and int8.fits(dtype, stored.shape[1])
    )


class Int8PanelLinear(nn.Module):
    """A ``QuantisedLinear`` of int8 with inputs of int8: products and sums are of integers, and exact.

    Args:
        layer: see ``multiplies_int8``.
        memory: receives the panels; see ``num_bytes``.
        live: as of ``PanelLinear``.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor
    bias: torch.Tensor | None
    input_scale: torch.Tensor | None
    live: torch.Tensor | None

    def __init__(self, layer: QuantisedLinear, memory: Arena, live: torch.Tensor | None) -> None:
        super().__init__()
        stored, bias = layer.stored, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.label = f"{stored.label}, inputs of int8"
        codes = memory.take(int8.packed_shape(*stored.shape), torch.int8)
        int8.pack(stored.codes, codes)
        for name, tensor in (
            ("codes", codes),
            ("scales", pack_bias(_by_output(stored.scales, stored)[:, 0])),
            ("sums", int8.pack_sums(stored.codes)),
            ("bias", None if bias is None else pack_bias(bias.detach())),
            ("input_scale", None if layer.input_scale is None else layer.input_scale.float()),
            ("live", live),
        ):
            self.register_buffer(name, tensor, persistent=False)
        self._operator = int8.operator()

    @staticmethod
    def num_bytes(layer: QuantisedLinear) -> int:
        """Bytes of the packed codes."""
        return math.prod(int8.packed_shape(*layer.stored.shape))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Int8PanelLinear:
        """Leave the buffers as they are, whatever the dtype of their inputs."""
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Only [1, tokens, features] has the tokens of the step in their order.
        live = self.live if x.dim() == 3 and x.shape[0] == 1 else None
        return self._operator(
            x, self.codes, self.scales, self.sums, self.bias, self.out_features, self.input_scale, live
        )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.label}, in panels"


LAYERS_OF_CODES = (
    QuantisedLinear,
    PanelQuantisedLinear,
    Int8PanelLinear,
    HPUInt4Linear,
    HPUFp8Linear,
    TritonLinear,
)
"""Classes of layers whose weights stay codes."""


def weights_of(model: nn.Module) -> tuple[str, int]:
    """Return the formats of the linear weights of a model, with their kernels, and the bytes of all weights.

    Args:
        model: as it is served. Stores of keys and values, and states of rows, are no weights.
    """
    found: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, PanelQuantisedLinear | Int8PanelLinear):
            found[f"{module.label} ({KERNEL})"] += 1
        elif isinstance(module, HPUInt4Linear | HPUFp8Linear):
            found[f"{module.label} ({HPU_KERNEL})"] += 1
        elif isinstance(module, TritonLinear):
            found[f"{module.label} ({CUDA_KERNEL})"] += 1
        elif isinstance(module, QuantisedLinear):
            found[f"{module.stored.label} (dequantised at each use)"] += 1
    own = [each for each in model.modules() if not isinstance(each, AttentionLayer | RecurrentStates)]
    tensors = {
        id(tensor): tensor
        for module in own
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    names = [f"{name} in {number} layers" for name, number in found.items()]
    return ", ".join(names) or "plain", sum(each.nbytes for each in tensors.values())
