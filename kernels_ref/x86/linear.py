"""Linear layers whose weight is packed once: fast for one row, for a batch and for a prompt.

Products are summed in float32. Inputs are bfloat16 with a weight of bfloat16, and results rounded once; or
float32 with a weight of bfloat16, float16 or float32, and results float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from kernels_ref.x86.library import NUMBER_OF, Instructions, is_available, require, serves

NAME = "hpu_duo_x86_v3.linear.default"
"""The operator of ``multiply``, as torch calls it."""

PANEL = 32
"""Outputs that are packed together, as well as inputs; the last ones are filled up with zeros."""


def fits(weight_NK: torch.Tensor, arithmetic: torch.dtype | None = None) -> bool:
    """Whether a weight ``[outputs, inputs]`` can be packed for this machine.

    Args:
        arithmetic: dtype of the inputs that it will be multiplied with; None = that of the weight.
    """
    dtype = arithmetic or weight_NK.dtype
    return weight_NK.device.type == "cpu" and serves(weight_NK.dtype, dtype) and is_available(dtype)


def packed_shape(
    num_outputs: int, num_inputs: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[int, int, int, int, int, int]:
    """Shape of a packed weight: panels, steps over the inputs, halves, rows, outputs, inputs.

    A half of a step is a tile: of bfloat16, 16 rows with a pair of inputs for each of 16 outputs; of another
    ``dtype``, 32 rows with one input.
    """
    half = PANEL // 2
    pair = 2 if dtype == torch.bfloat16 else 1
    return -(-num_outputs // PANEL), -(-num_inputs // PANEL), 2, PANEL // pair, half, pair


def pack(weight_NK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """A weight in panels, of ``packed_shape``.

    Args:
        out: where to put it.
    """
    num_outputs, num_inputs = weight_NK.shape
    missing = (0, -num_inputs % PANEL, 0, -num_outputs % PANEL)
    padded = torch.nn.functional.pad(weight_NK, missing) if any(missing) else weight_NK
    shape = packed_shape(num_outputs, num_inputs, weight_NK.dtype)
    out = padded.new_empty(shape) if out is None else out
    panels, steps, halves, rows, outputs, pair = shape
    # Pairs of inputs stay together: as one number each they are copied faster.
    item = torch.int32 if pair == 2 else padded.dtype
    padded = padded.contiguous()
    padded = padded.clone() if padded.storage_offset() % pair else padded
    pairs = padded.view(item).view(panels, halves, outputs, steps, rows)
    out.view(item).squeeze(-1).copy_(pairs.permute(0, 3, 1, 4, 2))
    return out


def pack_bias(bias_N: torch.Tensor) -> torch.Tensor:
    """A bias in float32, filled up to whole panels."""
    return torch.nn.functional.pad(bias_N.float(), (0, -bias_N.shape[0] % PANEL))


def multiply(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    live: torch.Tensor | None = None,
    instructions: Instructions = "best",
) -> torch.Tensor:
    """``x [..., inputs]`` times the packed weight, plus the packed bias: ``[..., out_features]``.

    Args:
        live: int32 ``[2]``. If the number of rows of ``x`` is the first number, only the second number of
            rows are multiplied, and the results of the others are 0.
        instructions: "best" is vectors for one row, and tiles, where there are any, for more; for float32
            the most lanes.

    Raises:
        ValueError: ``x`` has another dtype or number of inputs, or there is no such kernel here.
    """
    require(x.dtype)
    return torch.ops.hpu_duo_x86_v3.linear.default(
        x, packed, bias, out_features, live, NUMBER_OF[instructions]
    )


MOST_WEIGHTS = 8
"""Weights that one call of ``each_operator`` multiplies with."""


@cache
def each_operator(count: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The operator that multiplies the same inputs with several weights, as ``multiply`` does, bit for bit.

    It takes ``x``, the packed weights, biases and numbers of outputs one after the other, ``live`` and a
    number of ``NUMBER_OF``. Inputs are packed once for all of them, and threads share all outputs. Its errors
    are those of ``multiply``.

    Args:
        count: of weights, 2 to ``MOST_WEIGHTS``.

    Raises:
        ValueError: there is no such kernel here.
    """
    require(None)
    return register_each("linears", count, at=1 + 2 * count)


def register_each(name: str, count: int, *, at: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The operator of some weights, with a fake version for compiled code.

    Args:
        name: of its function with lists.
        count: of weights.
        at: the place of their numbers of outputs among the arguments.
    """

    def shapes(x: torch.Tensor, *others: int) -> tuple[torch.Tensor, ...]:
        return tuple(x.new_empty(*x.shape[:-1], size) for size in others[at - 1 : at - 1 + count])

    operator: Callable[..., tuple[torch.Tensor, ...]] = getattr(
        getattr(torch.ops.hpu_duo_x86_v3, name), f"n{count}"
    )
    torch.library.register_fake(f"hpu_duo_x86_v3::{name}.n{count}", shapes)
    return operator
