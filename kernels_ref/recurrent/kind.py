"""Kinds of states that a layer's own recurrence reads and writes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

from kernels_ref.rows import RowKind
from kernels_ref.step import PlanKey, Step, StepParts, StepTensors


class Recurrence(RowKind):
    """A state that is updated where the layer computes its outputs, not behind them."""

    @property
    @abstractmethod
    def key(self) -> PlanKey:
        """Equal for states that need the same tensors of a step."""

    def advance(self, state: tuple[torch.Tensor, ...], step: Step) -> None:
        """Do nothing: the layer updates its state."""

    @abstractmethod
    def prepare(self, parts: StepParts, tensors: StepTensors) -> Any:
        """Derive on the device what all layers with this ``key`` need in a step."""


def prepare_recurrences(
    kinds: Iterable[Recurrence], parts: StepParts, tensors: StepTensors
) -> dict[PlanKey, Any]:
    """Derive what all recurrences of a model need in a step, by their keys."""
    return {key: kind.prepare(parts, tensors) for key, kind in {kind.key: kind for kind in kinds}.items()}
