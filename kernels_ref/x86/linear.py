"""Linear layers of bfloat16 whose weight is packed once: fast for one row, for a batch and for a prompt.

Products are summed in float32 and rounded once.
"""

from __future__ import annotations

import torch

from kernels_ref.x86.library import is_available, require

PANEL = 64
"""Outputs that are packed together; the last panel is filled up with zeros."""


def fits(weight_NK: torch.Tensor) -> bool:
    """Whether a weight ``[outputs, inputs]`` can be packed for this machine."""
    is_cpu_bfloat16 = weight_NK.dtype == torch.bfloat16 and weight_NK.device.type == "cpu"
    return is_cpu_bfloat16 and weight_NK.shape[1] % 2 == 0 and is_available()


def packed_shape(num_outputs: int, num_inputs: int) -> tuple[int, int, int, int]:
    """Shape of a packed weight: panels, pairs of inputs, outputs of a panel, inputs of a pair."""
    return -(-num_outputs // PANEL), num_inputs // 2, PANEL, 2


def pack(weight_NK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """A weight in panels, of ``packed_shape``.

    Args:
        out: where to put it.
    """
    missing = -weight_NK.shape[0] % PANEL
    padded = torch.nn.functional.pad(weight_NK, (0, 0, 0, missing)) if missing else weight_NK
    panels = padded.reshape(-1, PANEL, weight_NK.shape[1] // 2, 2).transpose(1, 2)
    return panels.contiguous() if out is None else out.copy_(panels)


def pack_bias(bias_N: torch.Tensor) -> torch.Tensor:
    """A bias in float32, filled up to whole panels."""
    return torch.nn.functional.pad(bias_N.float(), (0, -bias_N.shape[0] % PANEL))


def multiply(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    live: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x [..., inputs]`` times the packed weight, plus the packed bias: ``[..., out_features]``.

    Args:
        live: int32 ``[2]``. If ``x`` has as many rows as the first number says, only as many of them as the
            second says are multiplied, and the results of the others are 0.

    Raises:
        ValueError: ``x`` is not bfloat16 or has another number of inputs, or there is no such kernel here.
    """
    require()
    return torch.ops.hpu_duo_x86.linear.default(x, packed, bias, out_features, live)
