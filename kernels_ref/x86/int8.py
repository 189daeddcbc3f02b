"""Linear layers of int8 codes with inputs that are rounded to int8: sums of integers, which are exact.

Inputs are bfloat16 or float32, and results have their dtype. A code is ``x / scale``, rounded to the nearest,
half a step to even. Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from kernels_ref.x86.library import lanes, require
from kernels_ref.x86.linear import PANEL, register_each
from kernels_ref.x86.quantised import product_shape

_INPUTS = 4
"""Inputs of an output that lie side by side."""
_MOST_INPUTS = 1 << 16
"""Sums of 32 bits hold the products of as many inputs."""


def fits(dtype: torch.dtype, num_inputs: int) -> bool:
    """Whether inputs of a dtype can be multiplied on this machine."""
    return dtype in (torch.bfloat16, torch.float32) and num_inputs <= _MOST_INPUTS and _is_available()


@cache
def _is_available() -> bool:
    try:
        require(None)
    except ValueError:
        return False
    return bool(lanes())


def packed_shape(num_outputs: int, num_inputs: int) -> tuple[int, int, int, int]:
    """Shape of packed codes: panels, groups of 4 inputs, outputs, inputs."""
    return -(-num_outputs // PANEL), -(-num_inputs // PANEL) * (PANEL // _INPUTS), PANEL, _INPUTS


def pack(codes_NK: torch.Tensor, out: torch.Tensor) -> None:
    """Write codes of int8 in panels.

    Args:
        out: int8, zeros of ``packed_shape``.
    """
    num_outputs, num_inputs = codes_NK.shape
    missing = (0, -num_inputs % PANEL, 0, -num_outputs % PANEL)
    whole = torch.nn.functional.pad(codes_NK, missing) if any(missing) else codes_NK
    panels, steps, outputs, _ = out.shape
    # Four inputs stay together: as one number they are copied faster.
    as_fours = whole.contiguous().view(torch.int32).view(panels, outputs, steps)
    out.view(torch.int32).squeeze(-1).copy_(as_fours.transpose(1, 2))


def pack_sums(codes_NK: torch.Tensor) -> torch.Tensor:
    """Sums of the codes of each output, int32, filled up to whole panels."""
    sums = codes_NK.sum(dim=1, dtype=torch.int32)
    return torch.nn.functional.pad(sums, (0, -codes_NK.shape[0] % PANEL))


NAME = "hpu_duo_x86_v3.int8_linear.default"
"""The operator of ``operator``, as torch calls it."""


@cache
def _registered() -> None:
    require(None)
    torch.library.register_fake("hpu_duo_x86_v3::int8_linear", product_shape)


def operator() -> Callable[..., torch.Tensor]:
    """The operator that rounds rows to int8, and multiplies them with packed codes.

    Arguments: ``x`` ``[..., K]``; codes of ``pack``; scales of the outputs, of ``linear.pack_bias``; sums of
    ``pack_sums``; a bias of ``linear.pack_bias``, or None; outputs; one scale of all inputs, float32, or
    None for one of each row, its largest size / 127; ``live`` as in ``linear.multiply``; and a number of
    ``library.NUMBER_OF``. Result: ``[..., N]``.

    Raises:
        ValueError: there is no such kernel here. The operator raises it for tensors that do not go together.
    """
    _registered()
    found: Callable[..., torch.Tensor] = torch.ops.hpu_duo_x86_v3.int8_linear.default
    return found


@cache
def each_operator(count: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The operator that multiplies the same rows with several weights, as ``operator`` does, bit for bit.

    It takes all codes, all scales and so on, one after the other, up to the outputs. Rows are rounded once.

    Args:
        count: of weights, 2 to ``linear.MOST_WEIGHTS``.

    Raises:
        ValueError: as for ``operator``.
    """
    _registered()
    return register_each("int8_linears", count, at=1 + 4 * count)
