"""Round plain weights to codes: to the nearest, without data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType

import torch

from hpu_duo.modeling.quantised.format import in_slabs
from hpu_duo.modeling.quantised.inc import LinearScales
from hpu_duo.modeling.quantised.weight import FP8_MAX, NIBBLE, QuantisedWeight, pack_nibbles

GROUP = 128
"""Inputs of a group of 4-bit codes."""
_LEAST_GROUP = 32
"""The smallest group: kernels read so many inputs at a time."""


@dataclass(frozen=True)
class Rounding:
    """A number format of codes.

    Attributes:
        largest: code of the value of largest size, up to rounding.
        least, most: bounds of codes.
        is_grouped: whether groups of inputs have scales of their own, instead of outputs.
    """

    largest: float
    least: float
    most: float
    is_grouped: bool = False


FORMATS = MappingProxyType(
    {
        "int8": Rounding(127, -127, 127),
        # The scale of compressed-tensors: half a step is left above, none below.
        "int4": Rounding(7.5, -8, 7, is_grouped=True),
        "fp8": Rounding(FP8_MAX, -FP8_MAX, FP8_MAX),
    }
)
"""Formats that plain weights are rounded to, by their names."""


def group_of_inputs(num_inputs: int) -> int | None:
    """Return the largest group up to ``GROUP`` that divides the inputs; None if none is at least 32."""
    size = gcd(num_inputs, GROUP)
    return size if size >= _LEAST_GROUP else None


def can_round(shape: tuple[int, ...], name: str) -> bool:
    """Whether a weight of a shape can be rounded to a format."""
    return len(shape) == 2 and (not FORMATS[name].is_grouped or group_of_inputs(shape[1]) is not None)


def rounded(weight: torch.Tensor, name: str, scale_dtype: torch.dtype) -> QuantisedWeight:
    """Round a weight ``[N, K]``, symmetrically; half a step is rounded to even.

    Scales are rounded before codes are computed from them.

    Args:
        weight: finite, ``can_round``.
        name: of ``FORMATS``.
        scale_dtype: of the scales.

    Raises:
        ValueError: a value is not finite.
    """
    kind = FORMATS[name]
    num_outputs, num_inputs = weight.shape
    group = (group_of_inputs(num_inputs) or num_inputs) if kind.is_grouped else num_inputs
    grouped = weight.unflatten(1, (-1, group))
    size = grouped.abs().amax(dim=-1).float()
    if not bool(size.isfinite().all()):
        raise ValueError("expected finite weights to quantise, got infinity or NaN")
    # A scale of zeros may be any number.
    scales = (size / kind.largest).to(scale_dtype)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))

    def rows(some: slice) -> torch.Tensor:
        codes = (grouped[some].float() / scales[some].float()[..., None]).flatten(1)
        return (
            codes.clamp_(kind.least, kind.most)
            if name == "fp8"
            else codes.round_().clamp_(kind.least, kind.most)
        )

    shape, block = (num_outputs, num_inputs), (1, group)
    if name == "fp8":
        return QuantisedWeight(in_slabs(weight, shape, torch.float8_e4m3fn, rows), scales, shape, block)
    codes = in_slabs(weight, shape, torch.int8, rows)
    if name == "int8":
        return QuantisedWeight(codes, scales, shape, block)
    middle = 1 << (NIBBLE - 1)
    packed = pack_nibbles((codes + middle).to(torch.uint8))
    return QuantisedWeight(packed, scales, shape, block, middle, NIBBLE)


_TOLERANCE = 2**-6
"""Share by which a weight may exceed its measured size: measurements may be rounded to bfloat16."""


def rounded_by(weight: torch.Tensor, given: LinearScales) -> QuantisedWeight:
    """Round a weight ``[N, K]`` to fp8 by scales that were measured.

    Raises:
        ValueError: a value is not finite, or larger than what the scale was measured for.
    """
    # Without a copy of the weight.
    sizes = torch.maximum(weight.amax(dim=-1, keepdim=True), -weight.amin(dim=-1, keepdim=True)).float()
    if not bool(sizes.isfinite().all()):
        raise ValueError("expected finite weights to quantise, got infinity or NaN")
    if given.weight is None:
        scales = torch.tensor([[given.of_output(size)] for size in sizes.flatten().tolist()])
    else:
        scales = torch.tensor([[given.weight]])
        size, most = float(sizes.max()), given.largest * given.weight
        if size > most * (1 + _TOLERANCE):
            raise ValueError(
                f"expected weights of at most {most:g}, as their measured scale says, got {size:g}: "
                "the scales are of another checkpoint"
            )
    num_outputs, num_inputs = shape = weight.shape

    def rows(some: slice) -> torch.Tensor:
        of_rows = scales if len(scales) == 1 else scales[some]
        return (weight[some].float() / of_rows).clamp_(-given.largest, given.largest)

    codes = in_slabs(weight, shape, torch.float8_e4m3fn, rows)
    block = (num_outputs if len(scales) == 1 else 1, num_inputs)
    found = QuantisedWeight(codes, scales, (num_outputs, num_inputs), block)
    return replace(found, input_scale=given.inputs, largest=given.largest)
