"""Lengths of outputs, before they are there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from hpu_duo.request import Request


class OutputLengths(ABC):
    """Estimates how many tokens the output of a request will have; what it said once it keeps to."""

    def __init__(self) -> None:
        self._estimates: dict[Request, float] = {}

    def of(self, request: Request) -> float:
        """Return the estimate for an unfinished request."""
        if request not in self._estimates:
            self._estimates[request] = self._estimate(request)
        return self._estimates[request]

    def ended(self, request: Request) -> None:
        """Learn from a request that has ended, and forget it."""
        self._estimates.pop(request, None)

    @abstractmethod
    def _estimate(self, request: Request) -> float: ...


class StatedLengths(OutputLengths):
    """Takes ``SamplingParams.expected_tokens``, else the most tokens that the request may sample.

    Exact for requests that say how long they will be, or end at ``max_tokens``.
    """

    def _estimate(self, request: Request) -> float:
        return stated_length(request)


class RecentLengths(OutputLengths):
    """Takes the mean of a user's last outputs; before there is one, that of all users, else what is stated.

    Args:
        num_outputs: of a user that the mean is taken of.
    """

    def __init__(self, num_outputs: int = 5) -> None:
        super().__init__()
        self._num_outputs = num_outputs
        self._recent: dict[str | None, deque[int]] = {}
        self._of_all: deque[int] = deque(maxlen=_MOST_REMEMBERED)

    def _estimate(self, request: Request) -> float:
        recent = self._recent.get(request.params.user) or self._of_all
        return sum(recent) / len(recent) if recent else stated_length(request)

    def ended(self, request: Request) -> None:
        """Remember the length of an output, unless the request never ran."""
        super().ended(request)
        if request.num_output_tokens == 0:
            return
        # The user who was heard of last comes last, and the first one is forgotten when there are many.
        outputs = self._recent.pop(request.params.user, deque(maxlen=self._num_outputs))
        outputs.append(request.num_output_tokens)
        self._recent[request.params.user] = outputs
        self._of_all.append(request.num_output_tokens)
        if len(self._recent) > _MOST_USERS:
            del self._recent[next(iter(self._recent))]


_MOST_REMEMBERED, _MOST_USERS = 256, 65_536


def stated_length(request: Request) -> float:
    """Return the output tokens that a request is expected to have by its own word."""
    most = len(request.tokens) - request.num_prompt_tokens
    expected = request.params.expected_tokens
    return most if expected is None else min(expected, most)


LENGTHS = {"stated": StatedLengths, "recent": RecentLengths}
"""Sources of lengths by name."""


def make_lengths(name: str) -> OutputLengths:
    """Make the source of lengths of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in LENGTHS:
        raise ValueError(f"expected lengths to be one of {', '.join(LENGTHS)}, got {name!r}")
    return LENGTHS[name]()
