"""The kernels that steps run, as text, and what would be faster on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from hpu_duo.modeling.packed_linear import PanelLinear
from kernels_ref.native import COMPILERS, compiler
from kernels_ref.x86 import library as x86

if TYPE_CHECKING:
    from hpu_duo.engine.stepper import Runner


def weight_dtype(runner: Runner) -> torch.dtype:
    """The dtype of linear layers in memory."""
    model = runner.model.model
    return next((each.packed.dtype for each in model.modules() if isinstance(each, PanelLinear)), model.dtype)


def describe(runner: Runner) -> str:
    """The kernels of a runner: on a CPU their instructions, elsewhere the attention implementation."""
    spec = runner.model.specs[0]
    if runner.device.type != "cpu":
        return ", ".join((spec.impl.value, *spec.operators.names))
    arithmetic = runner.model.model.dtype
    if x86.is_available(arithmetic):
        return x86.description(arithmetic)
    return f"torch's ({torch.backends.cpu.get_cpu_capability()})"


def faster(runner: Runner) -> Iterator[str]:
    """Yield sentences on what would make steps faster on this machine."""
    if runner.device.type != "cpu" or x86.is_available(runner.model.model.dtype):
        return
    if x86.switch() == "0":
        yield f"{x86.SWITCH}=0 switches our kernels off, which are faster than torch's"
    elif x86.lanes() and compiler() is None:
        yield f"our kernels, which are faster than torch's, need a C++ compiler: {', '.join(COMPILERS)}"
