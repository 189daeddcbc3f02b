"""Experts in mxfp4: codes of four bits, and an exponent for each 32 inputs (gpt-oss)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType, MappingProxyType
from typing import TYPE_CHECKING

from hpu_duo.modeling.quantised.format import Header

if TYPE_CHECKING:
    import torch

BLOCK = 32
"""Inputs that share an exponent."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
"""Numbers by their codes."""
_BIAS = 127
_NAN = 255


@dataclass(frozen=True)
class MXFP4:
    """Weights ``[E, K, N]`` of E experts from codes ``[E, N, K / 32, 16]``, low halves of bytes first."""

    name = "mxfp4"
    leaves = MappingProxyType({"_blocks": True, "_scales": True})

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        """Return the shape of the weights."""
        codes, scales = headers["_blocks"], headers["_scales"]
        codes.need_dtype("U8")
        codes.need_dims(4)
        num_experts, num_outputs, num_blocks = codes.shape[:3]
        codes.need_shape((num_experts, num_outputs, num_blocks, BLOCK // 2), why="two codes in a byte")
        scales.need_dtype("U8", "F8_E8M0")
        scales.need_shape(codes.shape[:-1], why="an exponent for each block")
        return num_experts, num_blocks * BLOCK, num_outputs

    def read(self, tensors: Mapping[str, torch.Tensor], headers: Mapping[str, Header]) -> MXFP4Experts:
        """Return the weights."""
        import torch  # Slow to import, and not needed by plans.

        codes, scales = tensors["_blocks"], tensors["_scales"]
        if headers["_scales"].dtype != "U8":
            scales = scales.view(torch.uint8)
        return MXFP4Experts(codes, scales, self.shape(headers))


@dataclass(frozen=True)
class MXFP4Experts:
    """Weights of all experts of a layer.

    Attributes:
        codes: uint8 ``[E, N, K / 32, 16]``.
        exponents: uint8 ``[E, N, K / 32]``.
        shape: ``[E, K, N]``.
    """

    codes: torch.Tensor
    exponents: torch.Tensor
    shape: tuple[int, ...]

    def part(self, dim: int, some: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return some experts (``dim`` 0), inputs (1) or outputs (2), dequantised without the others."""
        begin, end, _ = some.indices(self.shape[dim])
        first, last = (begin // BLOCK, -(-end // BLOCK)) if dim == 1 else (begin, end)
        own = (slice(None),) * (0, 2, 1)[dim] + (slice(first, last),)
        num_experts, num_outputs, num_blocks = self.exponents[own].shape
        shape = num_experts, num_blocks * BLOCK, num_outputs
        # Inputs share exponents in blocks.
        before = begin - first * BLOCK if dim == 1 else 0
        whole = MXFP4Experts(self.codes[own], self.exponents[own], shape).dequantised(dtype)
        return whole.narrow(dim, before, end - begin)

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights."""
        import torch  # Slow to import, and not needed by plans.

        codes, scales = self.codes, self.exponents
        whole = codes.new_empty(self.shape, dtype=dtype)
        values = codes.new_tensor(VALUES, dtype=torch.float32)
        byte = torch.arange(256, device=codes.device)
        of_byte = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
        factors = torch.ldexp(torch.ones_like(byte, dtype=torch.float32), byte - _BIAS)
        factors[_NAN] = float("nan")
        # Expert by expert, so that float32 is there for one only.
        for expert, (halves, exponents) in enumerate(zip(codes, scales, strict=True)):
            # Several times as fast as an index.
            pairs = torch.nn.functional.embedding(halves.int(), of_byte)
            pairs *= factors[exponents.int()][..., None, None]
            whole[expert] = pairs.to(dtype).view(len(halves), -1).t()
        return whole


@dataclass(frozen=True)
class ExpertsByPart:
    """Weights ``[E, K, N]`` that are dequantised where they are read: all, or slices of one dimension.

    Attributes:
        stored: the codes.
        dtype: of what is read.
    """

    stored: MXFP4Experts
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        """Return the shape of the weights, as slices of safetensors do."""
        return list(self.stored.shape)

    def __getitem__(self, index: EllipsisType | tuple[slice, ...]) -> torch.Tensor:
        if index is Ellipsis:
            return self.stored.dequantised(self.dtype)
        if not isinstance(index, tuple) or any(each != slice(None) for each in index[:-1]):
            raise TypeError(f"expected all weights, or a slice of one dimension, got {index}")
        return self.stored.part(len(index) - 1, index[-1], self.dtype)
