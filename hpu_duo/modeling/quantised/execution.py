"""Choose how the weights of a checkpoint are executed on a device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hpu_duo.config.engine import ModelConfig
from hpu_duo.modeling.quantised import cuda, hpu, panels
from hpu_duo.modeling.quantised.checkpoint import quantisation_of
from hpu_duo.modeling.quantised.config import METHODS
from hpu_duo.modeling.quantised.inc import METHOD as INC
from hpu_duo.modeling.quantised.inc import IncScales, quant_config, read_inc
from hpu_duo.modeling.quantised.linear import (
    DEQUANTISED,
    Keeps,
    QuantisedLinear,
    WeightExecution,
    separate_inputs,
)
from hpu_duo.modeling.quantised.panels import multiplies_int8
from hpu_duo.modeling.quantised.rounding import FORMATS
from kernels_ref.x86.library import is_available

AUTO, STORED, DEQUANTISE = "auto", "stored", "dequantise"
PUBLISHED = "as published"


def kernel_for(device: torch.device, dtype: torch.dtype, may_round: bool = True) -> Keeps | None:
    """Return which weights a kernel of a device reads as codes; None where there is no such kernel.

    Args:
        device: where the model runs.
        dtype: of activations.
        may_round: whether a kernel may round them to a smaller format.
    """
    if device.type == "hpu" and dtype == torch.bfloat16:
        return partial(hpu.fits, device=device, may_round=may_round)
    if device.type == "cuda" and cuda.can_run(device, dtype):
        return cuda.fits
    if device.type == "cpu" and is_available(dtype):
        return partial(panels.fits, dtype=dtype)
    return None


def choose_execution(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> WeightExecution:
    """Return how the weights of a checkpoint are executed.

    Args:
        model: with the checkpoint and what its user wants.
        dtype: of the model.
        device: where it runs.

    Raises:
        ValueError: weights are plain, of another producer, or already quantised; they are plain and have to
            be served from codes; or see ``quantisation_of``.
    """
    execution, rounding = model.quantization_execution, rounding_of(model.path, model.quantization)
    found = quantisation_of(model.path)
    scales = inc_scales("quantization 'inc'", device) if rounding == INC else None
    rounds = (
        model.activations == PUBLISHED
        and found is not None
        and any(group.activations is not None for group in found.groups)
    )
    plain = WeightExecution(rounding=rounding, scales=scales, rounds_inputs=rounds)
    if execution == STORED and found is None and rounding is None:
        raise ValueError(
            "quantization_execution=stored needs quantised weights, or a format to quantise them to in "
            f"quantization, got plain weights in {model.path}"
        )
    if execution == DEQUANTISE or (found is None and rounding is None):
        return plain
    if execution == STORED:
        return replace(plain, keeps=_always)
    # Unpacked weights are read by no kernel.
    is_packed = device.type != "cpu" or model.pack_weights is not False
    keeps = kernel_for(device, dtype, model.activations == PUBLISHED) if is_packed else None
    return plain if keeps is None else replace(plain, keeps=keeps)


def separate_rounded_inputs(
    model: nn.Module, config: ModelConfig, weights: torch.dtype, arithmetic: torch.dtype, device: torch.device
) -> None:
    """Replace layers whose inputs are rounded, and of which no kernel does both, in place.

    Args:
        model: on the host still, as it was loaded.
        config: of the checkpoint.
        weights: dtype of plain weights.
        arithmetic: dtype of activations.
        device: where the model will run.
    """
    execution = choose_execution(config, arithmetic, device)

    def is_whole(layer: QuantisedLinear) -> bool:
        if config.quantization_execution == DEQUANTISE:
            return False
        if device.type == "hpu":
            is_fp8 = layer.activations is not None and layer.activations.kind == "fp8"
            return is_fp8 and hpu.fits(layer.stored, device)
        if device.type == "cuda":
            return cuda.can_run(device, arithmetic) and cuda.rounds_inputs(layer.stored)
        is_packed = device.type == "cpu" and config.pack_weights is not False
        return is_packed and multiplies_int8(layer, arithmetic)

    if execution.rounds_inputs:
        separate_inputs(model, is_whole, execution.keeps, weights)


def use_kernels(model: nn.Module, device: torch.device, dtype: torch.dtype, may_round: bool) -> None:
    """Replace the layers of codes that kernels of an accelerator read, in place.

    Args:
        model: on the host still.
        device: where it will run.
        dtype: of activations.
        may_round: whether kernels may round them to a smaller format.
    """
    if device.type == "hpu":
        hpu.use_operators(model, device, may_round)
    elif device.type == "cuda" and cuda.can_run(device, dtype):
        cuda.use_kernels(model)


def inc_scales(setting: str, device: torch.device) -> IncScales:
    """Read the scales that the environment's ``QUANT_CONFIG`` names.

    Args:
        setting: that needs them, for messages.
        device: they are for; any but an HPU takes those of each Gaudi.

    Raises:
        ValueError: see ``read_inc``; or they are for another device.
    """
    found = read_inc(quant_config(setting))
    if device.type == "hpu":
        found.check_device(2 if hpu.is_gaudi2(device) else 3)
    return found


def rounding_of(path: str | Path, quantization: str) -> str | None:
    """Return the format that plain weights of a checkpoint are rounded to; None if they stay, or are codes.

    Args:
        path: directory of the checkpoint.
        quantization: "auto", a producer of ``METHODS``, a format of ``FORMATS``, or "inc".

    Raises:
        ValueError: weights are plain, of another producer, or already quantised; or see ``quantisation_of``.
    """
    found = quantisation_of(path)
    if quantization == AUTO or (found is not None and found.method == quantization):
        return None
    if quantization in (*FORMATS, INC) and found is None:
        return quantization
    got = "plain weights" if found is None else f"{found.method} ({found.where})"
    wanted = f"weights quantised by {quantization}" if quantization in METHODS else "plain weights"
    raise ValueError(f"expected {wanted}, as quantization={quantization} says, got {got} in {path}")


def _always(stored: object) -> bool:
    return True


def execution_note(path: str | Path, execution: WeightExecution) -> tuple[str, ...]:
    """Return a sentence for the user about quantised weights; nothing where all weights are plain.

    Args:
        path: directory of the checkpoint.
        execution: of its weights.
    """
    found = quantisation_of(path)
    if found is None and execution.rounding is None:
        return ()
    what = (
        f"weights quantised by {found.method}"
        if found is not None
        else f"linear layers, rounded to {execution.rounding} at load (to the nearest, without data),"
    )
    if execution.scales is not None:
        what = f"linear layers, rounded to fp8 at load by the scales of {execution.scales.file},"
    inputs = ", with inputs rounded as the checkpoint states" if execution.rounds_inputs else ""
    if execution.keeps is DEQUANTISED.keeps:
        return (f"{what} are dequantised at load: they have the size of plain ones{inputs}",)
    return (
        f"{what} stay codes where a kernel reads them; stats().resolved has their format and bytes{inputs}",
    )
