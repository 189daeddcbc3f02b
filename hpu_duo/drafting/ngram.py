"""Drafts from the text itself: what followed its last tokens when they occurred first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hpu_duo.drafting.drafter import Drafter
from hpu_duo.drafting.text_index import TextIndex
from hpu_duo.request import Request

_MOST_MATCHES = 128


class NgramDrafter(Drafter):
    """Proposes what followed the first occurrence of the longest n-gram that the text ends with, as vLLM's.

    N-grams are found by their last two tokens, those of a single size by all of theirs. Of the occurrences of
    these tokens the last 128 are looked at.

    Args:
        shortest, longest: tokens of an n-gram, ``prompt_lookup_min`` and ``prompt_lookup_max``.
        num_drafts: most tokens to propose.
    """

    def __init__(self, shortest: int, longest: int, num_drafts: int) -> None:
        self._longest, self._num_drafts = longest, num_drafts
        # A single token occurs too often to find longer matches by it.
        self._grams = sorted({shortest, min(max(shortest, 2), longest)}, reverse=True)
        self._indices_of: dict[Request, list[TextIndex]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all indices."""
        return sum(index.num_bytes for indices in self._indices_of.values() for index in indices)

    def begin(self, request: Request) -> None:
        """Create the indices of a request."""
        self._indices_of[request] = [
            TextIndex(request.tokens, gram, request.num_prompt_tokens) for gram in self._grams
        ]

    def extend(self, request: Request, tokens: npt.NDArray[np.int32]) -> None:
        """Index further tokens."""
        for index in self._indices_of[request]:
            index.extend(index.num_indexed + len(tokens))

    def propose(self, request: Request, most: int) -> Sequence[int] | npt.NDArray[np.integer]:
        """Return what followed the longest n-gram."""
        end = request.tokens[max(0, request.num_tokens - self._longest) : request.num_tokens]
        for index in self._indices_of[request]:
            found = index.find(end, _MOST_MATCHES)
            if found is not None:
                longest = found.places[found.lengths == found.lengths.max()]
                return index.following(longest[-1:], min(most, self._num_drafts))[0]
        return ()

    def end(self, request: Request) -> None:
        """Drop the indices of a request."""
        self._indices_of.pop(request, None)
