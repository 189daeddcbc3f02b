"""The kernels that steps run, as text, and what would be faster on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kernels_ref.native import COMPILERS, compiler
from kernels_ref.x86 import library as x86

if TYPE_CHECKING:
    from hpu_duo.engine.stepper import Runner


def weight_dtype(runner: Runner) -> torch.dtype:
    """The dtype of the embedding table, which is that of linear layers."""
    # Several ranks wrap the table, so it is found as a parameter.
    weight: torch.Tensor = next(runner.model.model.get_input_embeddings().parameters())
    return weight.dtype


def describe(runner: Runner) -> str:
    """The kernels of a runner: on a CPU their instructions, elsewhere the attention implementation."""
    spec = runner.model.specs[0]
    if runner.device.type != "cpu":
        return ", ".join((spec.impl.value, *spec.operators.names))
    if _is_ours(runner.model.model.dtype):
        return x86.description()
    return f"torch's ({torch.backends.cpu.get_cpu_capability()})"


def _is_ours(arithmetic: torch.dtype) -> bool:
    return arithmetic == torch.bfloat16 and x86.is_available()


def faster(runner: Runner) -> Iterator[str]:
    """Yield sentences on what would make steps faster on this machine."""
    arithmetic = runner.model.model.dtype
    if runner.device.type != "cpu" or arithmetic != torch.bfloat16 or _is_ours(arithmetic):
        return
    if x86.switch() == "0":
        yield f"{x86.SWITCH}=0 switches our kernels off, which are faster than torch's"
    elif x86.is_supported() and compiler() is None:
        yield f"our kernels, which are faster than torch's, need a C++ compiler: {', '.join(COMPILERS)}"
