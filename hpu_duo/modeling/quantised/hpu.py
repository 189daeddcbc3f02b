"""Linear layers of codes by the operators of Gaudi's software: fp8 products, and 4 bits widened at each use.

Sources: the PyTorch bridge (``fp8_ops.cpp``, ``test_hpu_convert_from_int4.py``) and callers in vllm-gaudi.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from hpu_duo.modeling.quantised.linear import QuantisedLinear
from hpu_duo.modeling.quantised.weight import FP8_MAX, NIBBLE, QuantisedWeight, unpack_nibbles

_WORD = 8
"""Codes of 4 bits in an int32 word."""
GAUDI2_MAX = 240.0
"""The largest fp8 number of a Gaudi 2."""
KERNEL = "HPU operators"
"""Name of the kernels in reports."""
_LEAST = 1e-8


def fits(stored: QuantisedWeight, device: torch.device, may_round: bool = True) -> bool:
    """Whether an operator of the device reads a weight, and has passed a trial.

    Args:
        stored: 4 bits in groups of neighbours, of plain inputs, or fp8 with a scale of each output or of the
            tensor.
        device: an HPU.
        may_round: whether the operator may round inputs to fp8.
    """
    inputs, is_nibbles = stored.activations, stored.bits == NIBBLE
    if inputs is not None and (is_nibbles or inputs.kind != "fp8" or inputs.group is not None):
        return False
    if is_nibbles:
        # Inputs and outputs are counted in whole groups and words.
        is_whole = stored.shape[1] % stored.block[1] == 0 and stored.shape[0] % _WORD == 0
        is_plain = stored.block[0] == 1 and stored.group_of is None
        return is_whole and is_plain and _passes(HPUInt4Linear, device, False)
    is_fp8 = stored.codes.dtype == torch.float8_e4m3fn
    has_scales = stored.scales.numel() in (1, stored.shape[0]) and stored.scales.shape[1] == 1
    return may_round and is_fp8 and has_scales and _passes(HPUFp8Linear, device, is_gaudi2(device))


def is_gaudi2(device: torch.device) -> bool:
    """Whether an HPU is a Gaudi 2."""
    return str(torch.get_device_module(device).get_device_name()).endswith("2")


class HPUInt4Linear(nn.Module):
    """A layer of 4-bit codes, which become a plain weight in the dtype of the inputs at each use.

    Args:
        layer: ``fits``.
        is_narrow: not used.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bias: nn.Parameter | None

    def __init__(self, layer: QuantisedLinear, is_narrow: bool = False) -> None:
        super().__init__()
        stored = layer.stored
        self.in_features, self.out_features, self.label = layer.in_features, layer.out_features, stored.label
        self.register_parameter("bias", layer.bias)
        zeros = stored.zeros
        if isinstance(zeros, int):
            zeros = torch.full(stored.scales.shape, zeros, dtype=torch.uint8)
        codes = unpack_nibbles(stored.codes, self.in_features)
        for name, table in (
            ("words", _words(codes)),
            ("scales", stored.scales.t()),
            ("zeros", _words(zeros)),
        ):
            self.register_buffer(name, table.contiguous(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.ops.hpu.convert_from_uint4(self.words, self.scales.to(x.dtype), self.zeros, x.dtype)
        y = torch.matmul(x, weight)
        return y if self.bias is None else y + self.bias


def _words(codes_NK: torch.Tensor) -> torch.Tensor:
    """Codes turned round, ``[K, N / 8]``: eight outputs in a word, the first in its lowest bits."""
    parts = codes_NK.t().to(torch.int64).unflatten(1, (-1, _WORD))
    words = (parts << torch.arange(0, 4 * _WORD, 4)).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


class HPUFp8Linear(nn.Module):
    """A layer of fp8 codes. Inputs are rounded to fp8, by a constant, or each token by a scale of its own.

    Args:
        layer: ``fits``.
        is_narrow: whether fp8 ends at 240: larger codes are halved then, see ``QuantisedWeight.halved``.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    input_scale: torch.Tensor | None
    input_inverse: torch.Tensor | None
    bias: nn.Parameter | None

    def __init__(self, layer: QuantisedLinear, is_narrow: bool = False) -> None:
        super().__init__()
        stored, self.largest = layer.stored, GAUDI2_MAX if is_narrow else FP8_MAX
        if stored.largest > self.largest:
            stored = stored.halved()
        self.in_features, self.out_features, self.label = layer.in_features, layer.out_features, stored.label
        if stored.activations is not None and is_narrow:
            self.largest = FP8_MAX / 2  # the codes of the wider format, halved
        scale = None if stored.input_scale is None else torch.tensor([stored.input_scale])
        self.register_buffer("input_scale", scale, persistent=False)
        self.register_buffer("input_inverse", None if scale is None else 1 / scale, persistent=False)
        self.register_parameter("bias", layer.bias)
        turned = stored.codes.view(torch.uint8).t().contiguous().view(stored.codes.dtype)
        scales = stored.scales.float().reshape(1, -1).expand(1, self.out_features).contiguous()
        self.register_buffer("codes", turned, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        scale, inverse = self.input_scale, self.input_inverse
        if scale is None or inverse is None:
            scale = (rows.abs().amax(dim=-1, keepdim=True).float() + _LEAST) / self.largest
            inverse = 1 / scale
        codes = torch.ops.hpu.cast_to_fp8_v2(rows, inverse, False, False, self.codes.dtype)[0]
        y = torch.ops.hpu.fp8_gemm_v2(
            codes, False, self.codes, False, None, x.dtype, scale, self.scales, None, False
        ).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def use_operators(model: nn.Module, device: torch.device, may_round: bool = True) -> int:
    """Replace the layers of codes that operators read, in place; returns their number.

    Args:
        model: on the host still.
        device: it will run on, an HPU.
        may_round: whether operators may round inputs to fp8.
    """
    targets = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, QuantisedLinear) and fits(child.stored, device, may_round)
    ]
    for module, name in targets:
        child = getattr(module, name)
        kind = HPUInt4Linear if child.bits == NIBBLE else HPUFp8Linear
        setattr(module, name, kind(child, is_gaudi2(device)))
    return len(targets)


@cache
def _passes(kind: type[HPUInt4Linear | HPUFp8Linear], device: torch.device, is_narrow: bool) -> bool:
    """Whether the operators of a layer exist there, run, and return the product of a small weight."""
    generator = torch.Generator().manual_seed(0)
    shape = 16, 64
    if kind is HPUInt4Linear:
        codes = torch.randint(0, 256, (16, 32), generator=generator, dtype=torch.uint8)
        zeros = torch.randint(0, 16, (16, 2), generator=generator, dtype=torch.uint8)
        stored = QuantisedWeight(
            codes, torch.rand(16, 2, generator=generator).bfloat16(), shape, (1, 32), zeros, 4
        )
    else:
        values = torch.randn(16, 64, generator=generator).to(torch.float8_e4m3fn)
        stored = QuantisedWeight(values, torch.rand(16, 1, generator=generator), shape, (1, 64))
    x = torch.randn(3, 64, generator=generator).bfloat16()
    layer = QuantisedLinear(64, 16, None, stored)
    expected = x.double() @ layer.dequantised(torch.float32).double().t()
    try:
        got = kind(layer, is_narrow).to(device)(x.to(device)).cpu().double()
    except (RuntimeError, AttributeError, TypeError, ValueError):  # no such operator, or another version
        return False
    # Numbers of fp8 are rounded by 2^-4 at most.
    return bool((got - expected).norm() <= 2**-4 * expected.norm())
