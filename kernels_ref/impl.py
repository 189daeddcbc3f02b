"""Which kernels compute the parts."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import torch

from bias_builders import Window
from kernels_ref.partial import Partial
from kernels_ref.step import RingStep, StepTensors


class Implementation(str, Enum):
    """``reference``: portable torch. ``sdpa``: torch's fused CPU attention. ``triton``: CUDA kernels."""

    REFERENCE = "reference"
    SDPA = "sdpa"
    TRITON = "triton"


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
    ) -> Partial:
        """New tokens of multi-token rows against the new keys of their own row."""
        ...

    def shared_blocks(
        self,
        q_QKGD: torch.Tensor,
        k_XKBD: torch.Tensor,
        v_XKBD: torch.Tensor,
        t: StepTensors,
        softcap: float | None,
    ) -> Partial:
        """Every query against the blocks that more than one query reads."""
        ...

    def shared_rings(
        self,
        q_QKGD: torch.Tensor,
        k_RKWD: torch.Tensor,
        v_RKWD: torch.Tensor,
        t: StepTensors,
        ring: RingStep,
        window: Window,
        softcap: float | None,
    ) -> Partial:
        """Tokens of multi-token rows against what their ring held before the step."""
        ...

    def unique_blocks(
        self,
        q_NKGD: torch.Tensor,
        k_XKBD: torch.Tensor,
        v_XKBD: torch.Tensor,
        t: StepTensors,
        softcap: float | None,
    ) -> Partial:
        """Single-token rows against the blocks that only they read."""
        ...

    def unique_rings(
        self,
        q_NKGD: torch.Tensor,
        k_RKWD: torch.Tensor,
        v_RKWD: torch.Tensor,
        ring: RingStep,
        softcap: float | None,
    ) -> Partial:
        """Single-token rows against their own ring."""
        ...

    def write_kv(
        self,
        k_store: torch.Tensor,
        v_store: torch.Tensor,
        flat_index: torch.Tensor,
        k_QKD: torch.Tensor,
        v_QKD: torch.Tensor,
    ) -> None:
        """Put the keys and values of new tokens in place; see ``kernels_ref.index.write_kv``."""
        ...

    def finish(
        self,
        q_QKGD: torch.Tensor,
        of_tokens: list[Partial],
        of_rows: Partial | None,
        single_row: torch.Tensor,
        sinks_KG: torch.Tensor | None,
    ) -> torch.Tensor:
        """Merge, add sink logits, normalise; see ``kernels_ref.partial.finish``."""
        ...


def kernels(impl: Implementation) -> Kernels:
    """The module that implements the parts; optional packages are imported only here."""
    match impl:
        case Implementation.REFERENCE:
            from kernels_ref import reference

            return reference
        case Implementation.SDPA:
            from kernels_ref import sdpa

            return sdpa
        case Implementation.TRITON:
            from kernels_ref.triton import parts

            return parts
