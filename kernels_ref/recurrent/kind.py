"""Kinds of states that a layer's own recurrence reads and writes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kernels_ref.rows import RowKind
from kernels_ref.step import PlanKey, Step, StepParts, StepTensors


@dataclass(frozen=True, kw_only=True)
class Recurrence(RowKind):
    """A state that is updated where the layer computes its outputs, not behind them.

    Attributes:
        slack: tokens of a decode that can be taken back.
    """

    slack: int = 0

    @property
    def decode_slack(self) -> int:
        """``slack``."""
        return self.slack

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
