"""Token ids for traces that have lengths only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpu_duo.lab.traces.arrival import Arrival

_OWN, _BLOCK = 0, 1
"""Kinds of keys that random tokens are drawn under."""


class PromptIds:
    """Random token ids with the common beginnings that a trace describes.

    The tokens of a block follow from its id alone, and the other tokens of a request from its place in the
    trace: the same trace gives the same prompts, in any order, on any machine.

    Args:
        vocabulary: token ids to draw from, such as ``range(300, 16300)``.
        seed: other seeds give other prompts.

    Raises:
        ValueError: the vocabulary is empty or has negative ids.
    """

    def __init__(self, vocabulary: Sequence[int] | range, seed: int = 0) -> None:
        self._vocabulary = np.asarray(vocabulary, dtype=np.int32)
        if self._vocabulary.ndim != 1 or not len(self._vocabulary) or self._vocabulary.min() < 0:
            raise ValueError("expected a vocabulary of one or more token ids of at least 0")
        self._seed = seed

    def of(self, arrival: Arrival, index: int) -> np.ndarray:
        """Return the prompt of a request; int32 [num_prompt_tokens].

        Args:
            index: place of the request in its trace, from which tokens outside of named blocks follow.
        """
        num, size = arrival.num_prompt_tokens, arrival.block_size
        parts, place = [], 0
        for block in arrival.block_ids:
            if place >= num:
                break
            parts.append(self._draw((_BLOCK, block), size)[: num - place])
            place += size
        if place < num:
            parts.append(self._draw((_OWN, index), num - place))
        return np.concatenate(parts)

    def _draw(self, key: tuple[int, int], num: int) -> np.ndarray:
        kind, number = key
        # Ids of traces are hashes as well as numbers in a row, and may be negative: 64 bits in two words.
        words = (self._seed, kind, number & 0xFFFFFFFF, (number >> 32) & 0xFFFFFFFF)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(words))).choice(
            self._vocabulary, num
        )
