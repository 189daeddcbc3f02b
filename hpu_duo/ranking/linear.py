"""A linear model on the length of a prompt and the tokens it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from hpu_duo.ranking.ranker import Prompt, Ranker

_FIRST, _ANY, _PAIR, _LENGTH = range(4)
"""Kinds of features, which are hashed apart."""


class LinearRanker(Ranker):
    """Adds up a weight for each feature of a prompt, in a fraction of a millisecond.

    Features are the tokens of the beginning and of the end, pairs of neighbours among them, the first tokens,
    and the length on a logarithmic scale. Each is hashed to one of ``num_features`` weights, so that no
    vocabulary is needed.

    Args:
        num_features: weights, a power of two.
        max_tokens: tokens that are looked at, half at the beginning and half at the end.

    Raises:
        ValueError: an argument is out of range.
    """

    kind: ClassVar[str] = "linear"

    def __init__(self, num_features: int = 1 << 16, max_tokens: int = 512) -> None:
        super().__init__()
        if num_features < 2 or num_features & (num_features - 1) or max_tokens < 2:
            raise ValueError(
                "expected num_features to be a power of two and max_tokens 2 or more, got "
                f"{num_features} and {max_tokens}"
            )
        self._num_features, self._max_tokens = num_features, max_tokens
        self.weights = nn.EmbeddingBag(num_features, 1, mode="sum", include_last_offset=True)
        self.of_length = nn.Parameter(torch.zeros(()))
        nn.init.zeros_(self.weights.weight)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments to make it again."""
        return {"num_features": self._num_features, "max_tokens": self._max_tokens}

    def forward(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Return the scores of prompts."""
        features = [self._features(np.asarray(prompt, dtype=np.int64)) for prompt in prompts]
        offsets = torch.tensor([0, *np.cumsum([len(each) for each in features])])
        flat = torch.from_numpy(np.concatenate(features))
        # So that a long prompt counts no more than a short one.
        shares = torch.from_numpy(
            np.concatenate([np.full(len(e), len(e) ** -0.5, np.float32) for e in features])
        )
        lengths = torch.tensor([float(np.log(len(prompt))) for prompt in prompts])
        summed = self.weights(flat, offsets, per_sample_weights=shares).squeeze(1)
        return summed + self.of_length * lengths

    def _features(self, tokens: np.ndarray) -> np.ndarray:
        half = self._max_tokens // 2
        seen = tokens if len(tokens) <= self._max_tokens else np.concatenate([tokens[:half], tokens[-half:]])
        return np.concatenate(
            [
                self._hashed(_ANY, np.unique(seen)),
                self._hashed(_PAIR, np.unique(seen[:-1] * 0x10001 + seen[1:])),
                self._hashed(_FIRST, seen[:4] * 8 + np.arange(min(4, len(seen)))),
                self._hashed(_LENGTH, np.array([int(2 * np.log2(len(tokens)))])),
            ]
        )

    def _hashed(self, kind: int, values: np.ndarray) -> np.ndarray:
        """Spread values over the weights: the upper bits of a product with an odd constant (Knuth)."""
        mixed = (values.astype(np.uint64) * np.uint64(4) + np.uint64(kind)) * np.uint64(0x9E3779B97F4A7C15)
        return ((mixed >> np.uint64(32)) % np.uint64(self._num_features)).astype(np.int64)
