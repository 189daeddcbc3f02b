"""Weights in fp8 (e4m3) with a scale of the tensor, of each output, or of each block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from hpu_duo.modeling.quantised.format import Header
from hpu_duo.modeling.quantised.scaled import Block, check_scale, grid_of_scales, only

if TYPE_CHECKING:
    import torch

    from hpu_duo.modeling.quantised.weight import QuantisedWeight

_SCALES = ("weight_scale", "weight_scale_inv")


@dataclass(frozen=True)
class Fp8:
    """A weight ``[N, K]`` of codes times scales; those of ``weight_scale_inv`` multiply, too.

    Attributes:
        granularity: of scales without blocks: "tensor", "channel" (an output), None = either.
        block: outputs and inputs of one scale; None without blocks.
    """

    granularity: str | None = None
    block: Block | None = None

    name = "fp8"
    leaves = MappingProxyType({"weight": True, "weight_scale": False, "weight_scale_inv": False})

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        """Return the shape of the weight."""
        codes = headers["weight"]
        codes.need_dtype("F8_E4M3")
        codes.need_dims(2)
        found = [headers[name] for name in _SCALES if name in headers]
        if len(found) != 1:
            raise codes.refused(f"with one of {' and '.join(_SCALES)} beside it", len(found) or "none")
        check_scale(codes, found[0], self.granularity, self.block)
        return codes.shape

    def read(self, tensors: Mapping[str, torch.Tensor], headers: Mapping[str, Header]) -> QuantisedWeight:
        """Return the weight."""
        from hpu_duo.modeling.quantised.weight import QuantisedWeight

        num_outputs, num_inputs = self.shape(headers)
        shape = num_outputs, num_inputs
        scales, block = grid_of_scales(only(tensors, _SCALES), shape, self.block)
        return QuantisedWeight(tensors["weight"], scales, shape, block)
