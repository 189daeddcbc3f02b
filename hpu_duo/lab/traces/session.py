"""Conversations: requests of which each waits for the end of the one before."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hpu_duo.lab.traces.arrival import Arrival


@dataclass(frozen=True)
class Turn:
    """A further request of a session, whose prompt is all that was said before and some tokens more.

    Attributes:
        pause_s: seconds from the end of the request before.
        num_new_tokens: of the prompt, behind prompt and output of the request before; at least 1.
        num_output_tokens: at least 1.

    Raises:
        ValueError: a value out of range.
    """

    pause_s: float
    num_new_tokens: int
    num_output_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.pause_s < math.inf:
            raise ValueError(f"expected a pause of at least 0 s, got {self.pause_s}")
        for name in ("num_new_tokens", "num_output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")

    @property
    def num_tokens(self) -> int:
        """Tokens by which it makes the session longer."""
        return self.num_new_tokens + self.num_output_tokens


@dataclass(frozen=True)
class Session:
    """A request that comes at its time, and those that follow it one after the other.

    Attributes:
        first: the request that begins it.
        turns: the others, in order; empty for a request that stands alone.
    """

    first: Arrival
    turns: tuple[Turn, ...] = ()

    @property
    def num_requests(self) -> int:
        """Requests of the session."""
        return 1 + len(self.turns)

    def no_longer_than(self, max_tokens: int) -> Session | None:
        """Leave out the turns from the first one on whose prompt and output exceed ``max_tokens``.

        Returns:
            The rest; None if the first request is too long already.
        """
        num_tokens = self.first.num_tokens
        if num_tokens > max_tokens:
            return None
        for place, turn in enumerate(self.turns):
            num_tokens += turn.num_tokens
            if num_tokens > max_tokens:
                return Session(self.first, self.turns[:place])
        return self


def count_requests(sessions: Iterable[Session]) -> int:
    """Count the requests of all sessions."""
    return sum(session.num_requests for session in sessions)
