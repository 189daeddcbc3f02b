"""Weights in int8 with a scale of the tensor or of each output, and perhaps zero points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from hpu_duo.modeling.quantised.format import Header
from hpu_duo.modeling.quantised.scaled import check_scale, grid_of_scales

if TYPE_CHECKING:
    import torch

    from hpu_duo.modeling.quantised.weight import QuantisedWeight


@dataclass(frozen=True)
class Int8:
    """A weight ``[N, K]`` of codes less zero points, times scales.

    Attributes:
        granularity: of the scales: "tensor" or "channel" (an output).
        is_symmetric: whether zero points are absent, or 0.
    """

    granularity: str
    is_symmetric: bool = True

    name = "int8"

    @property
    def leaves(self) -> Mapping[str, bool]:
        """Ends of the names of the tensors of a weight, and whether they must be there."""
        return MappingProxyType(
            {"weight": True, "weight_scale": True, "weight_zero_point": not self.is_symmetric}
        )

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        """Return the shape of the weight."""
        codes, scale = headers["weight"], headers["weight_scale"]
        codes.need_dtype("I8")
        codes.need_dims(2)
        check_scale(codes, scale, self.granularity, None)
        if (zero := headers.get("weight_zero_point")) is not None:
            zero.need_dtype("I8")
            zero.need_shape(scale.shape, why="that of the scales")
        return codes.shape

    def read(self, tensors: Mapping[str, torch.Tensor], headers: Mapping[str, Header]) -> QuantisedWeight:
        """Return the weight."""
        from hpu_duo.modeling.quantised.weight import QuantisedWeight

        num_outputs, num_inputs = self.shape(headers)
        shape, zero = (num_outputs, num_inputs), tensors.get("weight_zero_point")
        if zero is not None and self.is_symmetric:
            if zero.any():
                raise headers["weight_zero_point"].refused(
                    "to be 0 in a symmetric encoding", "other zero points"
                )
            zero = None
        scales, block = grid_of_scales(tensors["weight_scale"], shape, None)
        zeros = 0 if zero is None else zero.reshape(scales.shape)
        return QuantisedWeight(tensors["weight"], scales, shape, block, zeros)
