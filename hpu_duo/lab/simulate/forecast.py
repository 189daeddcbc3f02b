"""Forecasts: what policies know of the outputs of simulated requests before they are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpu_duo.lab.traces import Arrival, PromptIds

if TYPE_CHECKING:
    from hpu_duo.scheduling.ranker import Ranker

_VOCABULARY = range(1, 50_000)


@dataclass(frozen=True)
class Forecast:
    """Expected lengths of outputs, and scores of prompts.

    Without a ranker the score of a request is its expected length, so that policies which go by scores have
    a perfect ranking, or one with the errors of the lengths.

    Attributes:
        length_error: standard deviation of the logarithm of expected lengths; with 0 they are right.
        ranker: scores prompts, which are then made as it has learned from them.
        encode: makes tokens of the texts of a trace, for the ranker.

    Raises:
        ValueError: ``length_error`` below 0.
    """

    length_error: float = 0.0
    ranker: Ranker | None = None
    encode: Callable[[str], list[int]] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.length_error < float("inf"):
            raise ValueError(f"expected a length error of at least 0, got {self.length_error}")

    def prompts(self, seed: int) -> Callable[[Arrival, int], np.ndarray]:
        """Return what makes the prompt of a request from its trace and its place there.

        Args:
            seed: of the tokens; with a ranker they are those of its traces, which have no other seed.
        """
        if self.ranker is None:
            return PromptIds(_VOCABULARY, seed).of
        from hpu_duo.lab.ranker_training import VOCABULARY, TracePrompts  # transformers: only with a ranker

        return TracePrompts(VOCABULARY, self.encode).of

    def expected_tokens(self, num_output: int, seed: int, place: int) -> int:
        """Return how long an output is expected to be, 1 or more; the same for a seed and a place."""
        if not self.length_error:
            return num_output
        error = np.random.default_rng((seed, place)).normal(0.0, self.length_error)
        return max(1, round(num_output * float(np.exp(error))))

    def score(self, prompt: np.ndarray, expected_tokens: int) -> float:
        """Return the place of a request in the ranking, lower for shorter outputs.

        Raises:
            ValueError: a token that the ranker does not know.
        """
        if self.ranker is None:
            return float(expected_tokens)
        size = self.ranker.vocab_size
        if size is not None and prompt.max() >= size:
            raise ValueError(f"expected tokens below {size}, which the ranker knows, got {prompt.max()}")
        (found,) = self.ranker.score([prompt])
        return found
