"""One request as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from hpu_duo.lab.load.endpoint import Piece


class Failure(Enum):
    """Reason why a request did not get its whole answer."""

    STATUS = "status"
    CONNECTION = "connection"
    TIMEOUT = "timeout"
    STREAM = "stream"
    """The answer cannot be read, reports a failure, or is cut off."""
    INTERRUPTED = "interrupted"
    """The run was interrupted."""


@dataclass
class Outcome:
    """Times in seconds since the run began, by one clock.

    Attributes:
        planned_s: planned time of sending.
        is_sent, sent_s: whether it was sent, and the time.
        token_times_s: times of the events with tokens.
        end_s: time of the end of the answer, or of its failure.
        num_prompt_tokens, num_output_tokens: as the server counts; else as planned, and by events.
        is_counted_by_server: whether the server counts.
        texts: of the events.
        failure: None for a whole answer.
        status: HTTP status, if there was one.
        error: the failure in words.
    """

    planned_s: float
    num_prompt_tokens: int
    is_sent: bool = False
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_output_tokens: int = 0
    is_counted_by_server: bool = False
    texts: list[str] = field(default_factory=list)
    failure: Failure | None = None
    status: int | None = None
    error: str = ""

    def take(self, piece: Piece, now_s: float) -> None:
        """Record an event."""
        if piece.is_choice:
            self.end_s = now_s
        if piece.is_token:
            self.token_times_s.append(now_s)
            self.texts.append(piece.text)
            if not self.is_counted_by_server:
                self.num_output_tokens += 1
        if piece.num_output_tokens is not None:
            self.num_output_tokens, self.is_counted_by_server = piece.num_output_tokens, True
        if piece.num_prompt_tokens is not None:
            self.num_prompt_tokens = piece.num_prompt_tokens

    @property
    def text(self) -> str:
        """The answer, as far as it came."""
        return "".join(self.texts)

    @property
    def is_whole(self) -> bool:
        """Whether the answer came to its end."""
        return self.failure is None

    @property
    def lag_s(self) -> float:
        """Seconds by which it was sent later than planned."""
        return self.sent_s - self.planned_s

    @property
    def ttft_s(self) -> float:
        """From sending to the first token; 0 without tokens."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else 0.0

    @property
    def latency_s(self) -> float:
        """From sending to the end."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token behind the first one; None for fewer than two."""
        if self.num_output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Gaps between events with tokens."""
        times = self.token_times_s
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def kind(self) -> str:
        """Name of the failure, with the status of an HTTP error: ``status 429``."""
        if self.failure is None:
            return "whole"
        return f"status {self.status}" if self.failure is Failure.STATUS else self.failure.value
