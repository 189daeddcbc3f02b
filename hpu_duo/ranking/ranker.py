"""Models that give a prompt its place in the order of output lengths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

Prompt = np.ndarray | Sequence[int]


class Ranker(nn.Module, ABC):
    """Scores prompts: the lower, the shorter the output that is expected. Only the order means something.

    Attributes:
        kind: name in files.
        vocab_size: tokens of prompts have to be below it; None = any will do.
    """

    kind: ClassVar[str]
    vocab_size: int | None = None

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Arguments to make it again, as JSON takes them."""

    @abstractmethod
    def forward(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Return the scores of prompts, float32 [number of prompts], with gradients."""

    @torch.inference_mode()
    def score(self, prompts: Sequence[Prompt]) -> list[float]:
        """Return the scores of prompts, of at least one token each."""
        return self(prompts).tolist() if prompts else []
