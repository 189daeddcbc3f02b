"""Kinds of state that a running request has in a layer besides keys and values.

A state of a fixed size per request, a recurrence for instance. What attention heads store for a request, in
rings or under a budget, is defined by their ``GroupKind``; the memory plan, copies, snapshots and saved
contexts see both as one list of states of a row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch

from kernels_ref.step import Step


class RowTensor(NamedTuple):
    """A tensor of a state, as it is for one row.

    Attributes:
        name: distinct within the kind.
        shape: of one row; the tensor of all rows is ``[R + 1, *shape]``, the null row behind the R others.
        dtype: of the elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


class RowKind(ABC):
    """A kind of state with a row for each running request; a frozen dataclass of plain numbers.

    Rows are copied, with all their state, when requests fork or move, and to and from the snapshots of the
    prefix cache. A row is never cleared: a request whose ``StepTensors.row_start`` is 0 starts from an
    initial state, whatever the content of its row.

    Attributes:
        name: of the kind, as names of tensors and fingerprints show it; distinct within a layer.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def tensors(self) -> tuple[RowTensor, ...]:
        """Tensors of the state."""

    @property
    def can_rewind(self) -> bool:
        """Whether a row can be rolled back by as many tokens as a row decodes in a step.

        If it is not, requests do not fork behind a prompt, whose last token each sample computes again, and a
        row decodes ``decode_slack + 1`` tokens in a step at most.
        """
        return False

    @property
    def decode_slack(self) -> int:
        """Tokens of the last decode that can be taken back, where ``can_rewind`` is False."""
        return 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return sum(each.num_bytes for each in self.tensors)

    @abstractmethod
    def advance(self, state: tuple[torch.Tensor, ...], step: Step) -> None:
        """Update the state with the new tokens of a step, on the device, after the layer's attention.

        Rows of the step come first; tokens of padding have no row, and rows without new tokens stay as they
        are.

        Args:
            state: ``tensors`` of all rows, written in place.
        """
