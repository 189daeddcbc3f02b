"""Events of a stream on their way through: passed on whole, and counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

_DONE = b"[DONE]"


@dataclass
class AnswerCounts:
    """Tokens of an answer, as far as it tells.

    Attributes:
        num_outputs: tokens; of a stream without usage, events.
        num_cached_share: share of the prompt that the replica had cached; None where it does not tell.
    """

    num_outputs: int = 0
    num_cached_share: float | None = None

    def take_usage(self, usage: Any) -> None:
        """Read the object ``usage`` of an answer, if it is one."""
        try:
            self.num_outputs = int(usage["completion_tokens"])
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            self.num_cached_share = min(1.0, int(cached) / int(usage["prompt_tokens"]))
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return


class WholeEvents:
    """Takes pieces of a stream of events, and gives whole ones.

    What a connection that breaks has left of an event is never passed on, so what is said behind it is an
    event of its own.

    Attributes:
        counts: of the answer so far.
        has_data: whether an event with data has come.
        is_done: whether the event has come that ends an answer.
        is_error: whether the last event with data tells an error.
    """

    def __init__(self) -> None:
        self.counts = AnswerCounts()
        self.has_data = self.is_done = self.is_error = False
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """Take a piece; returns the events that it completes."""
        data = self._rest + piece
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._rest = data
            return b""
        self._rest = data[end:]
        for event in data[:end].split(b"\n\n"):
            if event.startswith(b"data:"):
                self._take(event.removeprefix(b"data:").strip())
        return data[:end]

    def _take(self, data: bytes) -> None:
        if data == _DONE:
            self.is_done = True
            return
        self.has_data = True
        self.is_error = data.startswith(b'{"error"')
        self.counts.num_outputs += not self.is_error
        if b'"usage":{' in data.replace(b" ", b""):
            self.counts.take_usage(from_json(data).get("usage"))


def counts_of(body: bytes) -> AnswerCounts:
    """The counts of a whole answer."""
    counts = AnswerCounts()
    try:
        fields = from_json(body)
    except ValueError:
        return counts
    if isinstance(fields, dict):
        counts.take_usage(fields.get("usage"))
    return counts
