"""Times at which the tokens of a call came."""

from __future__ import annotations

import time
from typing import Protocol


class TokenWatch(Protocol):
    """A listener to how long tokens take."""

    def first_token(self, seconds: float) -> None:
        """Since the request arrived."""

    def next_token(self, seconds: float) -> None:
        """Since the one before of the same choice."""


class Timing:
    """Moments of one call, by ``time.perf_counter``.

    Args:
        watch: told about each token.

    Attributes:
        arrived: when the call was made.
        admitted: when the first of its prompts that has a token got a row; None before.
        first, last: when its first and its last token came; None before.
    """

    def __init__(self, watch: TokenWatch | None = None) -> None:
        self.arrived = time.perf_counter()
        self.admitted: float | None = None
        self.first: float | None = None
        self.last: float | None = None
        self._watch = watch
        self._last_of: dict[int, float] = {}

    def came(self, choice: int, at: float, admitted_at: float | None = None) -> None:
        """Note that a token of a choice came.

        Args:
            admitted_at: when its prompt got a row, where that is reported.
        """
        before = self._last_of.get(choice)
        self._last_of[choice] = self.last = at
        if self.first is None:
            self.first, self.admitted = at, admitted_at
        if self._watch is None:
            return
        if before is None:
            self._watch.first_token(at - self.arrived)
        else:
            self._watch.next_token(at - before)
