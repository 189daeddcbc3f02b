"""Kinds of states that a layer's own recurrence reads and writes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kernels_ref.rows import RowKind
from kernels_ref.step import PlanKey, Step, StepParts, StepTensors

OPERATIONS_PER_ELEMENT = 7
"""Of a token on each element of a state: decay, product with the key, sum of a product, and its reading."""


class RecurrenceCounts(NamedTuple):
    """Work of a recurrence in a step.

    Attributes:
        updates: how many times a row's state is read and written.
        vector_ops: operations element by element.
        products: operations of matrix products.
        launches: operators.
    """

    updates: Any
    vector_ops: Any
    products: Any = 0.0
    launches: Any = 20.0


@dataclass(frozen=True, kw_only=True)
class Recurrence(RowKind):
    """A state that is updated where the layer computes its outputs, not behind them.

    Attributes:
        slack: tokens of a decode that can be taken back.
        drafts: whether the model drafts as many tokens over its states before a decode.
    """

    slack: int = 0
    drafts: bool = False

    @property
    def decode_slack(self) -> int:
        """``slack``."""
        return self.slack

    @property
    @abstractmethod
    def key(self) -> PlanKey:
        """Equal for states that need the same tensors of a step."""

    def count(self, num_tokens: Any, num_rows: Any, *, has_prompts: bool) -> RecurrenceCounts:
        """Return the work of a step in a layer: all elements of a row are updated token by token.

        Args:
            num_tokens, num_rows: of the step, numbers or arrays.
            has_prompts: whether rows may have more tokens than a decode.
        """
        elements = sum(math.prod(each.shape) for each in self.tensors)
        return RecurrenceCounts(num_rows, OPERATIONS_PER_ELEMENT * elements * num_tokens)

    @abstractmethod
    def transient_bytes(self, num_tokens: int, num_rows: int, *, has_prompts: bool) -> int:
        """Return an upper bound of the intermediates of a step in a layer, in bytes.

        Those of its module that are alive at the same time are included.

        Args:
            num_tokens, num_rows, has_prompts: see ``count``.
        """

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
