"""Linear layers of 8-bit or 4-bit codes, read as they are stored: for one row, a batch and a prompt.

Activations are bfloat16, or float32 with the results then float32 too. Products are summed in float32 for
each group of inputs, multiplied with the scale of the group, and rounded once at the end. With integer codes,
inputs of float32 are rounded to 16 bits first, by 2^-16 of the largest of up to 256 neighbours in a group,
and their sums are exact. Shapes: N outputs, K inputs, G groups of inputs, P panels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from kernels_ref.x86.library import is_available, require
from kernels_ref.x86.linear import PANEL, register_each


def fits(dtype: torch.dtype, num_groups: int, group: int) -> bool:
    """Whether weights of a layout can be multiplied on this machine.

    Args:
        dtype: of activations.
        num_groups: of an output.
        group: inputs of a group.
    """
    is_known = dtype in (torch.bfloat16, torch.float32)
    return is_known and (num_groups == 1 or group % PANEL == 0) and is_available(dtype)


def padded(size: int) -> int:
    """Outputs, or inputs, in whole panels."""
    return -(-size // PANEL) * PANEL


def bytes_shape(num_outputs: int, num_inputs: int) -> tuple[int, int, int, int]:
    """Shape of packed codes of a byte: panels, pairs of inputs, outputs, inputs."""
    return padded(num_outputs) // PANEL, padded(num_inputs) // 2, PANEL, 2


def nibbles_shape(num_outputs: int, num_inputs: int) -> tuple[int, int, int, int]:
    """Shape of packed codes of 4 bits, in words of 16 bits: panels, groups of 8 inputs, outputs, inputs.

    Nibbles of a word are two inputs apart.
    """
    return padded(num_outputs) // PANEL, padded(num_inputs) // 8, PANEL, 2


def pack_bytes(codes_NK: torch.Tensor, out: torch.Tensor) -> None:
    """Write codes of int8 or e4m3 in panels.

    Args:
        out: of the same dtype, zeros of ``bytes_shape``.
    """
    num_outputs, num_inputs = codes_NK.shape
    whole = codes_NK.view(torch.uint8)
    missing = (0, -num_inputs % PANEL, 0, -num_outputs % PANEL)
    if any(missing):
        whole = torch.nn.functional.pad(whole, missing)
    panels, pairs, outputs, _ = out.shape
    # Pairs of inputs stay together: as one number each they are copied faster.
    as_pairs = whole.contiguous().view(torch.int16).view(panels, outputs, pairs)
    out.view(torch.int16).squeeze(-1).copy_(as_pairs.transpose(1, 2))


def pack_nibbles(codes_NK: torch.Tensor, out: torch.Tensor) -> None:
    """Write codes below 16 in panels.

    Args:
        codes_NK: uint8.
        out: int16, zeros of ``nibbles_shape``.
    """
    num_outputs, num_inputs = codes_NK.shape
    missing = (0, -num_inputs % PANEL, 0, -num_outputs % PANEL)
    whole = torch.nn.functional.pad(codes_NK, missing) if any(missing) else codes_NK
    panels, steps, outputs, _ = out.shape
    parts = whole.reshape(panels, outputs, steps, 4, 2)
    for panel in range(panels):  # so that words of 32 bits are there for one panel only
        codes = parts[panel].to(torch.int32)
        words = codes[..., 0, :] | codes[..., 1, :] << 4 | codes[..., 2, :] << 8 | codes[..., 3, :] << 12
        out[panel] = words.to(torch.int16).transpose(0, 1)


def pack_table(table_NG: torch.Tensor) -> torch.Tensor:
    """Scales or zero points in panels, ``[P, G, PANEL]``."""
    num_outputs, num_groups = table_NG.shape
    whole = torch.nn.functional.pad(table_NG, (0, 0, 0, -num_outputs % PANEL))
    return whole.view(-1, PANEL, num_groups).transpose(1, 2).contiguous()


NAME = "hpu_duo_x86_v3.linear_of_codes.default"
"""The operator of ``operator``, as torch calls it."""


def product_shape(
    x: torch.Tensor, codes: object, scales: object, sums: object, bias: object, size: int, *_: object
) -> torch.Tensor:
    """An empty result of an operator on codes, ``[..., N]``, for inputs ``[..., K]``."""
    return x.new_empty(*x.shape[:-1], size)


@cache
def _registered() -> None:
    require(None)
    torch.library.register_fake("hpu_duo_x86_v3::linear_of_codes", product_shape)


def operator() -> Callable[..., torch.Tensor]:
    """The operator that multiplies rows with packed codes, and adds a packed bias.

    Arguments: ``x`` bfloat16 or float32 ``[..., K]``; codes of ``bytes_shape`` (int8 or e4m3) or
    ``nibbles_shape``; scales of ``pack_table``, float32, bfloat16 or float16; zero points of the same shape,
    int8, less the middle code (0 of int8, 8 of nibbles), or None; a bias of ``linear.pack_bias``, or None;
    outputs; inputs of a group, the padded number of all if there is one group; ``live`` as in
    ``linear.multiply``; and, of float32, a number of ``library.NUMBER_OF``.
    Result: ``[..., N]``.

    Raises:
        ValueError: there is no such kernel here. The operator raises it for tensors that do not go together.
    """
    _registered()
    found: Callable[..., torch.Tensor] = torch.ops.hpu_duo_x86_v3.linear_of_codes.default
    return found


@cache
def each_operator(count: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The operator that multiplies the same rows with several weights, as ``operator`` does, bit for bit.

    It takes all codes, all scales and so on, one after the other, up to the inputs of a group.

    Args:
        count: of weights, 2 to ``linear.MOST_WEIGHTS``.

    Raises:
        ValueError: as for ``operator``.
    """
    _registered()
    return register_each("linears_of_codes", count, at=1 + 4 * count)
