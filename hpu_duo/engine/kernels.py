"""The kernels that steps run, as text, and what would be faster on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from hpu_duo.modeling.packed_linear import PanelLinear
from hpu_duo.modeling.quantised.panels import PanelQuantisedLinear
from kernels_ref import Implementation
from kernels_ref.native import COMPILERS, compiler
from kernels_ref.x86 import library as x86

if TYPE_CHECKING:
    from hpu_duo.engine.stepper import Runner


_LOSS = "decodes of a small model take 1.6 to 2.5 times as long with torch's operators in AVX2"
"""Of a Llama of 110M: 32 rows and one row in float32, see ``docs/cpu.md``."""


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
    layers = (isinstance(each, PanelLinear | PanelQuantisedLinear) for each in runner.model.model.modules())
    if x86.is_available(arithmetic) and (spec.impl is Implementation.SDPA or any(layers)):
        return x86.description(arithmetic)
    return f"torch's ({torch.backends.cpu.get_cpu_capability()})"


def faster(runner: Runner) -> Iterator[str]:
    """Yield sentences on what would make steps faster on this machine."""
    dtype = runner.model.model.dtype
    if runner.device.type != "cpu" or x86.is_available(dtype):
        return
    if x86.switch() == "0":
        yield f"{x86.SWITCH}=0 switches our kernels off: {_LOSS}"
    elif x86.lanes() and compiler() is None:
        yield f"our kernels need a C++ compiler, one of {', '.join(COMPILERS)}: {_LOSS}"
    elif x86.serves(dtype, dtype):
        yield f"our kernels could not be built, and a warning has the reason: {_LOSS}"
    elif x86.serves(dtype, torch.float32):
        yield f"dtype='auto' computes in float32 on the same 16-bit weights, by our kernels: {_LOSS}"
