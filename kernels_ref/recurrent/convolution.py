"""Short causal convolutions over time: a row's state is its last inputs.

Inputs are in slots by position, as keys of a ring: with some more slots than an output reads, the last tokens
of a decode can be taken back.

Shapes: Q query tokens, N rows, K size of the kernel, W slots of a row, K - 1 at least, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from kernels_ref.recurrent.kind import Recurrence
from kernels_ref.rows import RowTensor
from kernels_ref.step import PlanKey, Step, StepParts, StepTensors
from kernels_ref.units import gather, index_dtype

_COPIES = 5
"""Inputs of a token beside its windows: in the list of all, in the module and, with gates, its projection."""

_SUMS = 3
"""Copies of a sum over a window: before and after a product is added, and the product."""


class ConvolutionStep(NamedTuple):
    """Places of inputs in a step, in a list of the new ones ``[Q]``, those of states ``[N * W]``, and a zero.

    Attributes:
        windows: of the K inputs that end with each token, ``[Q * K]``.
        kept: of the inputs in each row's slots behind the step, ``[N * W]``.
        rows: whose states are written: the row, or the null row for one without new tokens, ``[N]``.
    """

    windows: torch.Tensor
    kept: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class Convolution(Recurrence):
    """The inputs of a convolution over time that a row's next tokens read, by position.

    Attributes:
        channels: of an input.
        kernel_size: inputs that an output reads, its own token's included.
        dtype: of the inputs.
    """

    channels: int
    kernel_size: int
    dtype: torch.dtype
    name: ClassVar[str] = "convolution"

    def __post_init__(self) -> None:
        if self.channels < 1 or self.kernel_size < 2:
            raise ValueError(
                "expected a convolution of 1 channel and 2 inputs at least, got "
                f"{self.channels} and {self.kernel_size}"
            )

    @property
    def num_slots(self) -> int:
        """Inputs of a row (W)."""
        return self.kernel_size - 1 + self.slack

    @property
    def tensors(self) -> tuple[RowTensor, ...]:
        """The inputs, ``[W, C]``."""
        return (RowTensor("inputs", (self.num_slots, self.channels), self.dtype),)

    @property
    def key(self) -> PlanKey:
        """The size of the kernel, and the slots."""
        return self.name, self.kernel_size, self.num_slots

    def transient_bytes(self, num_tokens: int, num_rows: int, *, has_prompts: bool) -> int:
        """Count windows of all tokens and what the module makes, and float32 sums of one output each."""
        inputs = (_COPIES + self.kernel_size) * num_tokens + num_rows * self.num_slots
        sums = _SUMS * num_tokens * torch.float32.itemsize
        return self.channels * (inputs * self.dtype.itemsize + sums)

    def prepare(self, parts: StepParts, tensors: StepTensors) -> ConvolutionStep:
        """Derive the places of inputs; see ``ConvolutionStep``."""
        t, width = tensors, self.kernel_size - 1
        num_tokens, num_rows = len(t.row), len(t.row_start)
        zero = num_tokens + num_rows * self.num_slots
        token, row, slot = (
            torch.arange(size, dtype=torch.int32, device=t.row.device)
            for size in (num_tokens, num_rows, self.num_slots)
        )
        # Tokens of padding have the row behind the last one.
        start = gather(torch.cat([t.row_start, t.row_start.new_zeros(1)]), t.row)
        local = t.positions - start
        windows = []
        for age in range(width, 0, -1):
            position = t.positions - age
            of_state = num_tokens + t.row * self.num_slots + torch.remainder(position, self.num_slots)
            before = torch.where(torch.logical_and(start > 0, position >= 0), of_state, zero)
            windows.append(torch.where(local >= age, token - age, before))
        windows.append(token)
        end, begin = (t.row_start + t.row_num_new)[:, None], t.row_start[:, None]
        # Of the last positions, the one in each slot.
        position = end - 1 - torch.remainder(end - 1 - slot, self.num_slots)
        of_new = t.row_query_start[:, None] + position - begin
        kept = torch.where(position >= begin, of_new, num_tokens + row[:, None] * self.num_slots + slot)
        null = torch.full_like(row, -1)
        rows = torch.where(t.row_num_new > 0, row, null)
        return ConvolutionStep(torch.stack(windows, dim=1).flatten(), kept.flatten(), rows)

    def windows(self, inputs: torch.Tensor, state: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the inputs that each token's output reads, ``[Q, K, C]``, and update the state.

        Args:
            inputs: of the new tokens, ``[Q, C]``.
            state: of all rows, ``[R + 1, W, C]``, written in place.
        """
        found: ConvolutionStep = step.plans[self.key]
        num_rows = len(found.rows)
        before = state[:num_rows].flatten(0, 1)
        known = torch.cat([inputs.to(self.dtype), before, before.new_zeros(1, self.channels)])
        windows = gather(known, found.windows).view(-1, self.kernel_size, self.channels)
        kept = gather(known, found.kept).view(num_rows, -1, self.channels)
        null = len(state) - 1
        rows = torch.where(found.rows < 0, null, found.rows).to(index_dtype(state.device))
        state.index_copy_(0, rows, kept)
        return windows


def causal_convolution(
    windows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the output of each token, ``[Q, C]`` in the dtype of the inputs; sums are in float32.

    Args:
        windows: inputs of each token, ``[Q, K, C]``.
        weight: ``[C, K]``.
        bias: ``[C]``.
    """
    weight_KC = weight.float().t()
    total = windows[:, 0].float() * weight_KC[0]
    for place in range(1, windows.shape[1]):
        total = total + windows[:, place].float() * weight_KC[place]
    if bias is not None:
        total = total + bias.float()
    return total.to(windows.dtype)
