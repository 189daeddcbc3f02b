"""Choice of the kernels that attend, and the reasons why others cannot."""

from __future__ import annotations

import logging

import torch

from hpu_duo.modeling.probe import DecoderLayer
from kernels_ref import Implementation, Softmax
from kernels_ref.triton import availability

_log = logging.getLogger(__name__)


def choose_kernels(name: str, device: torch.device, layers: tuple[DecoderLayer, ...]) -> Implementation:
    """The implementation of the attention parts.

    Raises:
        ValueError: "sdpa" for a device other than CPU, or for a model with soft-capped scores; "triton"
            where Triton cannot run, or for heads that its kernels are not made for.
    """
    has_softcap = any(layer.call.softcap is not None for layer in layers)
    if name == "auto":
        return _best_kernels(device, layers, has_softcap)
    if name == Implementation.TRITON.value:
        reason = _triton_problem(device, layers)
        if reason is not None:
            raise ValueError(f"attention 'triton' was asked for, but {reason}")
    if name == Implementation.SDPA.value:
        if device.type != "cpu":
            raise ValueError(f"attention 'sdpa' is torch's CPU kernel, got device {str(device)!r}")
        if has_softcap:
            raise ValueError("attention 'sdpa' has no soft cap, which this model needs; expected 'reference'")
    return Implementation(name)


def check_softmax(softmax: Softmax, impl: Implementation) -> None:
    """Refuse fast softmax where the kernels compute scores in float32 only.

    Raises:
        ValueError: they do.
    """
    if softmax is Softmax.FAST and impl is not Implementation.REFERENCE:
        raise ValueError(
            f"softmax 'fast' was asked for, but attention {impl.value!r} computes scores in float32: "
            "expected softmax 'exact', or attention 'reference'"
        )


def _best_kernels(
    device: torch.device, layers: tuple[DecoderLayer, ...], has_softcap: bool
) -> Implementation:
    if device.type == "cpu":
        return Implementation.REFERENCE if has_softcap else Implementation.SDPA
    if device.type != "cuda":
        return Implementation.REFERENCE
    reason = _triton_problem(device, layers)
    if reason is None:
        return Implementation.TRITON
    _log.warning("attention runs on the portable implementation: %s", reason)
    return Implementation.REFERENCE


def _triton_problem(device: torch.device, layers: tuple[DecoderLayer, ...]) -> str | None:
    largest = max(layer.call.head_dim for layer in layers)
    served = availability.MAX_HEAD_DIM
    if largest > served:
        return f"its kernels serve head sizes of up to {served}, and this model has heads of {largest}"
    return availability.problem(device)
