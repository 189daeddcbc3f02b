"""The token history that repetition, presence and frequency penalties are computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hpu_duo.sampling.params import SamplingParams


class TokenCounts(NamedTuple):
    """The distinct tokens of one request and how often each occurs in its output.

    Attributes:
        token_ids: int32 [M].
        codes: float32 [M], exact integers: ``2 * occurrences in the output + 1``.
    """

    token_ids: npt.NDArray[np.int32]
    codes: npt.NDArray[np.float32]

    def behind(self, token_id: int) -> TokenCounts:
        """Return the counts after one more generated token; these stay as they are."""
        token_ids, codes = self.token_ids, self.codes.copy()
        places = np.flatnonzero(token_ids == token_id)
        if not len(places):
            token_ids, codes = np.append(token_ids, np.int32(token_id)), np.append(codes, np.float32(1))
        codes[places if len(places) else -1] += 2.0
        return TokenCounts(token_ids, codes)


@dataclass
class PenaltyState:
    """The distinct tokens of one request and how often each occurs in its output.

    Owned by the request and changed only by ``append``, in constant time. It is a function of the token ids
    alone, so ``from_token_ids`` gives the same state.

    A token's code is ``2 * (occurrences in the output) + 1``; a token never seen has code 0. So one number
    per token tells the device both "was seen" (repetition) and "how often was it generated" (presence,
    frequency).
    """

    _size: int = 0
    _token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(16, np.int32))
    _codes: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(16, np.float32))
    _position: dict[int, int] = field(default_factory=dict)

    @classmethod
    def from_token_ids(
        cls, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()
    ) -> PenaltyState | None:
        """The state after ``output_ids`` were generated, or ``None`` if ``params`` uses no penalty.

        Args:
            prompt_ids: token ids of the prompt; they count only towards the repetition penalty.
            output_ids: token ids generated so far (none for a new request).
        """
        if not params.needs_penalties:
            return None
        state = cls()
        if params.needs_prompt_history:
            state._extend(np.unique(np.asarray(prompt_ids, dtype=np.int32)))
        for token_id in output_ids:
            state.append(int(token_id))
        return state

    def append(self, token_id: int) -> None:
        """Count one generated token."""
        at = self._position.get(token_id)
        if at is None:
            at = self._size
            self._extend(np.array([token_id], dtype=np.int32))
        self._codes[at] += 2.0

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """The distinct tokens seen, int32 [M], in order of first appearance (prompt tokens ascending)."""
        return self._token_ids[: self._size]

    @property
    def codes(self) -> npt.NDArray[np.float32]:
        """float32 [M], exact integers: ``2 * occurrences in the output + 1``."""
        return self._codes[: self._size]

    @property
    def counts(self) -> TokenCounts:
        """Both, valid up to the next ``append``."""
        return TokenCounts(self.token_ids, self.codes)

    def _extend(self, new_ids: npt.NDArray[np.int32]) -> None:
        start, end = self._size, self._size + len(new_ids)
        if end > len(self._token_ids):
            capacity = max(end, 2 * len(self._token_ids))
            self._token_ids = np.concatenate([self.token_ids, np.empty(capacity - start, np.int32)])
            self._codes = np.concatenate([self.codes, np.empty(capacity - start, np.float32)])
        self._token_ids[start:end] = new_ids
        self._codes[start:end] = 1.0
        self._position.update(zip(new_ids.tolist(), range(start, end)))
        self._size = end
