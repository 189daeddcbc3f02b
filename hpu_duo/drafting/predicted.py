"""Drafts from a text that the caller expects the output to follow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hpu_duo.drafting.text_index import TextIndex

_GRAM, _LONGEST, _MOST_MATCHES = 2, 16, 32
_TOKENS_A_STEP = 4096
"""Tokens of a prediction that are indexed by a call of ``propose``: others follow in the next ones."""


class PredictedOutput:
    """A predicted output, and where the output has got to in it.

    Behind a difference it is aligned again where the last two or more tokens of the output occur in it: at
    the longest match, and among equal ones at the first that is not before the difference.

    Args:
        tokens: the prediction.

    Attributes:
        num_accepted, num_rejected: drafts of it that were verified.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = np.array(tokens, np.int32)
        self._index = TextIndex(self._tokens, _GRAM, len(self._tokens))
        self._at, self._is_aligned, self._num_output = 0, True, 0
        self.num_accepted = self.num_rejected = 0

    def propose(self, output: npt.NDArray[np.int32], most: int) -> list[int]:
        """Return the tokens that are predicted behind an output, which has only grown since the last call."""
        if (num_indexed := self._index.num_indexed) < len(self._tokens):
            self._index.extend(min(len(self._tokens), num_indexed + _TOKENS_A_STEP))
        new = output[self._num_output :]
        self._num_output = len(output)
        if self._is_aligned and np.array_equal(self._tokens[self._at : self._at + len(new)], new):
            self._at += len(new)
        elif len(new):
            self._align(output)
        return self._tokens[self._at : self._at + most].tolist() if self._is_aligned else []

    def _align(self, output: npt.NDArray[np.int32]) -> None:
        found = self._index.find(output[-_LONGEST:], _MOST_MATCHES)
        self._is_aligned = found is not None
        if found is not None:
            places = found.places[found.lengths == found.lengths.max()]
            onwards = places[places >= self._at]
            self._at = int(onwards.min() if len(onwards) else places.max())
