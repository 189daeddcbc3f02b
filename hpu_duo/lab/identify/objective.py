"""The loss of the gates, and the rule by which they are updated.

Gates, gradients and moments are float64 arrays ``[L, K]`` on the host: they are few, sums of them then come
out the same on every device, and JSON carries them without loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Gates = NDArray[np.float64]


class LossForm(str, Enum):
    """Two readings of the same loss, which the published code and the paper give."""

    MEAN = "mean"
    """The code's: squared error averaged over labelled tokens and channels, plus the mean of all gates."""
    SUM = "sum"
    """The paper's: squared error summed over labelled tokens and channels, plus the sum of all gates."""

    def distillation(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Distance of hidden states ``[N, hidden]`` of one text, a float32 scalar."""
        squared = (student.float() - teacher.float()).square()
        return squared.mean() if self is LossForm.MEAN else squared.sum()

    def penalty(self, gates: Gates, trained: NDArray[np.bool_]) -> tuple[float, Gates]:
        """L1 of the gates of trained layers (bool ``[L]``), and its gradient, which is 0 at a gate of 0."""
        shown = gates * trained[:, None]
        scale = 1 / (int(trained.sum()) * gates.shape[1]) if self is LossForm.MEAN else 1.0
        return float(np.abs(shown).sum()) * scale, np.sign(shown) * scale


@dataclass(frozen=True)
class Schedule:
    """Learning rates of a run: warm-up over the first share of steps, cool-down over the last.

    Attributes:
        lr: peak learning rate.
        num_steps: steps of the run.
        ramp: share of the steps that each ramp takes.
        floor: least share of the peak.
    """

    lr: float = 0.02
    num_steps: int = 2000
    ramp: float = 0.2
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.num_steps < 1 or not self.lr > 0:
            raise ValueError(
                f"expected num_steps >= 1 and lr > 0, got num_steps={self.num_steps} and lr={self.lr}"
            )
        if not 0 < self.ramp <= 1 or not 0 <= self.floor <= 1:
            raise ValueError(f"expected ramp in (0, 1] and floor in [0, 1], got {self.ramp} and {self.floor}")

    def at(self, step: int) -> float:
        """Learning rate of step number ``step``, counted from 0."""
        length = self.num_steps * self.ramp
        up, down = (step + 1) / length, (self.num_steps - step) / length
        return self.lr * min(1.0, max(up, self.floor), max(down, self.floor))


@dataclass(frozen=True)
class AdamState:
    """Gates and moments after ``step`` steps; float64 ``[L, K]`` each."""

    step: int
    gates: Gates
    mean: Gates
    square: Gates

    @classmethod
    def initial(cls, gates: Gates) -> AdamState:
        """Return the state before the first step."""
        return cls(0, gates, np.zeros_like(gates), np.zeros_like(gates))

    def stepped(self, gradient: Gates, lr: float) -> AdamState:
        """Return the state after one more step of AdamW without weight decay, then gates cut to [0, 1].

        Source: Loshchilov and Hutter 2019 (arXiv:1711.05101), with PyTorch's defaults.
        """
        beta1, beta2, epsilon = 0.9, 0.999, 1e-8
        step = self.step + 1
        mean = beta1 * self.mean + (1 - beta1) * gradient
        square = beta2 * self.square + (1 - beta2) * gradient**2
        root = np.sqrt(square / (1 - beta2**step)) + epsilon
        moved = self.gates - lr * (mean / (1 - beta1**step)) / root
        return AdamState(step, np.clip(moved, 0.0, 1.0), mean, square)


def to_tensor(gates: Gates, device: torch.device) -> Tensor:
    """The gates as a float32 leaf ``[L, K]`` that collects gradients."""
    return torch.tensor(gates, dtype=torch.float32, device=device, requires_grad=True)
