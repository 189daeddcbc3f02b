"""Choice of the kernels that attend, and the reasons why others cannot."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from hpu_duo.modeling.probe import DecoderLayer
from kernels_ref import FusedOperators, Implementation, Softmax
from kernels_ref.chunks import MOST_INLINE, ChunkBounds
from kernels_ref.hpu.operators import LINE_BYTES, NO_OPERATORS
from kernels_ref.hpu.trial import Trial, try_operators
from kernels_ref.triton import availability

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChosenKernels:
    """The kernels that attend, and their choices; see ``LayerSpec``."""

    impl: Implementation
    softmax: Softmax = Softmax.EXACT
    operators: FusedOperators = NO_OPERATORS


def chunk_bounds(score_bytes: int, device: torch.device, impl: Implementation) -> ChunkBounds:
    """Return the bounds of chunks of context on a device.

    The loops of portable kernels would let graphs of accelerators grow with the context, so that only short
    ones are in them. Other implementations are operators, which have no loops in a graph.

    Args:
        score_bytes: see ``ModelConfig``.
        impl: the kernels that attend.
    """
    has_loops = device.type != "cpu" and impl in (Implementation.REFERENCE, Implementation.HPU)
    most_inline = MOST_INLINE if has_loops else None
    # Masks take the place of scores where attention is one operator.
    return ChunkBounds(score_bytes=score_bytes, mask_bytes=score_bytes, most_inline=most_inline)


def choose_kernels(
    name: str,
    device: torch.device,
    layers: tuple[DecoderLayer, ...],
    dtype: torch.dtype = torch.float32,
    softmax: Softmax = Softmax.EXACT,
) -> ChosenKernels:
    """The implementation of the attention parts.

    Args:
        name: as asked for, see ``ModelConfig.attention``.
        dtype: of the model.

    Raises:
        ValueError: "sdpa" for a device other than CPU, or for a model with soft-capped scores; "triton"
            where Triton cannot run, or for heads that its kernels are not made for; "hpu" where no fused
            operator passes its trial; or fast softmax for kernels that have none.
    """
    if name == "auto":
        chosen = _best_kernels(device, layers, dtype, softmax)
    elif name == Implementation.HPU.value:
        chosen = _fused_kernels(device, layers, dtype, softmax)
    else:
        chosen = ChosenKernels(_asked_for(Implementation(name), device, layers), softmax)
    if softmax is Softmax.FAST and chosen.impl not in (Implementation.REFERENCE, Implementation.HPU):
        raise ValueError(
            f"softmax 'fast' was asked for, but attention {chosen.impl.value!r} computes scores in float32: "
            "expected softmax 'exact', or attention 'reference' or 'hpu'"
        )
    return chosen


def line_bytes(device: torch.device) -> int:
    """Return the cache lines of fused statistics on a device; see ``FusedOperators``."""
    # The name of a device ends with its number.
    return LINE_BYTES if str(torch.get_device_module(device).get_device_name()).endswith("3") else 0


def _asked_for(
    impl: Implementation, device: torch.device, layers: tuple[DecoderLayer, ...]
) -> Implementation:
    if impl is Implementation.TRITON:
        reason = _triton_problem(device, layers)
        if reason is not None:
            raise ValueError(f"attention 'triton' was asked for, but {reason}")
    if impl is Implementation.SDPA:
        if device.type != "cpu":
            raise ValueError(f"attention 'sdpa' is torch's CPU kernel, got device {str(device)!r}")
        if _has_softcap(layers):
            raise ValueError("attention 'sdpa' has no soft cap, which this model needs; expected 'reference'")
    return impl


def _best_kernels(
    device: torch.device, layers: tuple[DecoderLayer, ...], dtype: torch.dtype, softmax: Softmax
) -> ChosenKernels:
    if device.type == "cpu":
        impl = Implementation.REFERENCE if _has_softcap(layers) else Implementation.SDPA
        return ChosenKernels(impl, softmax)
    portable = ChosenKernels(Implementation.REFERENCE, softmax)
    if device.type == "hpu":
        trial = _try_fused(device, layers, dtype, softmax)
        if trial.operators.names:
            return ChosenKernels(Implementation.HPU, softmax, trial.operators)
        reason: str | None = "; ".join(trial.problems)
    elif device.type == "cuda":
        reason = _triton_problem(device, layers)
        if reason is None:
            return ChosenKernels(Implementation.TRITON, softmax)
    else:
        return portable
    _log.warning("attention runs on the portable implementation: %s", reason)
    return portable


def _has_softcap(layers: tuple[DecoderLayer, ...]) -> bool:
    return any(layer.call.softcap is not None for layer in layers)


def _triton_problem(device: torch.device, layers: tuple[DecoderLayer, ...]) -> str | None:
    largest = max(layer.call.head_dim for layer in layers)
    served = availability.MAX_HEAD_DIM
    if largest > served:
        return f"its kernels serve head sizes of up to {served}, and this model has heads of {largest}"
    return availability.problem(device)


def _fused_kernels(
    device: torch.device, layers: tuple[DecoderLayer, ...], dtype: torch.dtype, softmax: Softmax
) -> ChosenKernels:
    if device.type != "hpu":
        raise ValueError(f"attention 'hpu' is made of operators of a Gaudi, got device {str(device)!r}")
    trial = _try_fused(device, layers, dtype, softmax)
    problems = "; ".join(trial.problems)
    if not trial.operators.names:
        raise ValueError(f"attention 'hpu' was asked for, but none of its operators passes: {problems}")
    if problems:
        _log.warning("attention 'hpu' does without some of its operators: %s", problems)
    return ChosenKernels(Implementation.HPU, softmax, trial.operators)


def _try_fused(
    device: torch.device, layers: tuple[DecoderLayer, ...], dtype: torch.dtype, softmax: Softmax
) -> Trial:
    """A trial of the operators for heads of every size in a model."""
    sizes = {(layer.call.num_heads // layer.call.num_kv_heads, layer.call.head_dim) for layer in layers}
    lines = line_bytes(device)
    trials = [try_operators(device, dtype, *each, softmax, lines) for each in sorted(sizes)]
    return Trial.of_all(trials)
