"""Scales of the tensor, of an output, or of a block, as weights in fp8 and int8 have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpu_duo.modeling.quantised.format import FLOATS, Header

if TYPE_CHECKING:
    import torch

Block = tuple[int, int]


def check_scale(codes: Header, scale: Header, granularity: str | None, block: Block | None) -> None:
    """Check the scales of a weight ``[N, K]``.

    Args:
        codes: of the weight.
        scale: of the weight.
        granularity: "tensor" or "channel", an output; None = either.
        block: outputs and inputs of one scale; None without blocks.

    Raises:
        ValueError: another dtype or shape.
    """
    scale.need_dtype(*FLOATS)
    num_outputs, num_inputs = codes.shape
    if block is not None:
        wanted = (-(-num_outputs // block[0]), -(-num_inputs // block[1]))
        scale.need_shape(wanted, why=f"blocks of {list(block)} of a weight {list(codes.shape)}")
        return
    shapes: list[tuple[int, ...]] = []
    if granularity != "channel":
        shapes += [(), (1,), (1, 1)]
    if granularity != "tensor":
        shapes += [(num_outputs, 1), (num_outputs,)]
    scale.need_shape(*shapes, why=f"a weight {list(codes.shape)}")


def grid_of_scales(
    scale: torch.Tensor, shape: tuple[int, ...], block: Block | None
) -> tuple[torch.Tensor, Block]:
    """Return scales or zero points as a matrix, with the outputs and inputs that share an entry.

    Args:
        scale: of the tensor, of each output, or of each block.
        shape: of the weight ``[N, K]``.
        block: outputs and inputs of one scale; None without blocks.
    """
    num_outputs, num_inputs = shape
    if block is not None:
        return scale, block
    if scale.numel() == 1:
        return scale.reshape(1, 1), (num_outputs, num_inputs)
    return scale.reshape(num_outputs, 1), (1, num_inputs)


def only(tensors: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> torch.Tensor:
    """Return the one tensor that is there of several names."""
    return next(tensors[name] for name in names if name in tensors)
