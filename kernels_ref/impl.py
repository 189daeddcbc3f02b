"""Which kernels compute the parts."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import torch

from bias_builders import Window
from kernels_ref.partial import Partial
from kernels_ref.step import RingStep, StepTensors


class Implementation(str, Enum):
    """``reference``: portable torch. ``sdpa``: torch's fused CPU attention for long prefills."""

    REFERENCE = "reference"
    SDPA = "sdpa"


class Kernels(Protocol):
    """The parts; see ``kernels_ref.reference`` for what each one computes."""

    def causal(
        self,
        q_QKGD: torch.Tensor,
        k_QKD: torch.Tensor,
        v_QKD: torch.Tensor,
        t: StepTensors,
        window: Window | None,
        softcap: float | None,
    ) -> Partial: ...

    def shared_blocks(
        self,
        q_QKGD: torch.Tensor,
        k_XKBD: torch.Tensor,
        v_XKBD: torch.Tensor,
        t: StepTensors,
        softcap: float | None,
    ) -> Partial: ...

    def shared_rings(
        self,
        q_QKGD: torch.Tensor,
        k_RKWD: torch.Tensor,
        v_RKWD: torch.Tensor,
        t: StepTensors,
        ring: RingStep,
        window: Window,
        softcap: float | None,
    ) -> Partial: ...

    def unique_blocks(
        self,
        q_NKGD: torch.Tensor,
        k_XKBD: torch.Tensor,
        v_XKBD: torch.Tensor,
        t: StepTensors,
        softcap: float | None,
    ) -> Partial: ...

    def unique_rings(
        self,
        q_NKGD: torch.Tensor,
        k_RKWD: torch.Tensor,
        v_RKWD: torch.Tensor,
        ring: RingStep,
        softcap: float | None,
    ) -> Partial: ...


def kernels(impl: Implementation) -> Kernels:
    """The module that implements the parts; optional packages are imported only here."""
    match impl:
        case Implementation.REFERENCE:
            from kernels_ref import reference

            return reference
        case Implementation.SDPA:
            from kernels_ref import sdpa

            return sdpa
