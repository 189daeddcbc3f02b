"""Prompts and the lengths of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hpu_duo.traces import Arrival, PromptIds

VOCABULARY = range(300, 1000)
"""Tokens that prompts without text are made of."""


class TracePrompts:
    """Prompts of a trace as rankers learn from them: its texts, or drawn tokens where it has none.

    Args:
        vocabulary: of requests without text: their tokens are drawn, so that equal blocks are equal.
        encode: makes tokens of texts; None where the trace has none.
    """

    def __init__(
        self, vocabulary: range = VOCABULARY, encode: Callable[[str], Sequence[int]] | None = None
    ) -> None:
        self._ids, self._encode = PromptIds(vocabulary), encode

    def of(self, arrival: Arrival, index: int) -> np.ndarray:
        """Return the prompt of a request; int32 [number of tokens].

        Args:
            index: place of the request in its trace.

        Raises:
            ValueError: a text and nothing to encode it.
        """
        if arrival.text is None:
            return self._ids.of(arrival, index)
        if self._encode is None:
            raise ValueError("expected a tokenizer for a trace with texts: give --tokenizer PATH")
        return np.asarray(self._encode(arrival.text), dtype=np.int32)


@dataclass(frozen=True)
class Examples:
    """Prompts with the output tokens that each had.

    Attributes:
        prompts: token ids of each.
        lengths: int64 [number of prompts].

    Raises:
        ValueError: a prompt is empty, or the numbers differ.
    """

    prompts: tuple[np.ndarray, ...]
    lengths: np.ndarray

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.lengths):
            raise ValueError(f"expected a length for each of {len(self.prompts)}, got {len(self.lengths)}")
        if any(len(prompt) == 0 for prompt in self.prompts):
            raise ValueError("expected prompts of at least one token, got an empty one")

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def of(
        cls,
        arrivals: Sequence[Arrival],
        encode: Callable[[str], Sequence[int]] | None = None,
        vocabulary: range = VOCABULARY,
    ) -> Examples:
        """Take them from a trace.

        Args:
            encode, vocabulary: see ``TracePrompts``.

        Raises:
            ValueError: a text and nothing to encode it.
        """
        make = TracePrompts(vocabulary, encode)
        prompts = [make.of(arrival, index) for index, arrival in enumerate(arrivals)]
        lengths = np.array([arrival.num_output_tokens for arrival in arrivals], dtype=np.int64)
        return cls(tuple(prompts), lengths)

    def take(self, places: np.ndarray) -> Examples:
        """Return those of some places."""
        return Examples(tuple(self.prompts[place] for place in places), self.lengths[places])

    def split(self, held_out: float, seed: int) -> tuple[Examples, Examples]:
        """Put some aside at random; returns the others first.

        Args:
            held_out: share to put aside, above 0 and below 1; at least two examples stay on each side.

        Raises:
            ValueError: the share is out of range, or there are fewer than four examples.
        """
        if not 0 < held_out < 1:
            raise ValueError(f"expected a share above 0 and below 1 to be held out, got {held_out}")
        if len(self) < 4:
            raise ValueError(f"expected at least 4 requests to learn from, got {len(self)}")
        order = np.random.default_rng(seed).permutation(len(self))
        cut = min(len(self) - 2, max(2, round(len(self) * held_out)))
        return self.take(order[cut:]), self.take(order[:cut])
