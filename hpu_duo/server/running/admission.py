"""Admission control, submissions to the engine, and timing of calls."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hpu_duo.sampling import SamplingParams

_NUM_ENDS = 64
_LONGEST_WAIT_S = 60


class Stage(Enum):
    """Stages of a server's lifecycle; only ``ready`` accepts requests."""

    WARMING_UP = "warming up"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class QueueFullError(Exception):
    """Too many samples are open.

    Attributes:
        retry_after_s: estimated whole seconds until there is room.
    """

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotServingError(Exception):
    """Requests are not accepted now.

    Attributes:
        stage: of the server.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(f"the server is {stage.value}")
        self.stage = stage


class Admission:
    """Accepts requests while the server is ready and the queue has room.

    Args:
        max_open: most samples that run and wait.

    Attributes:
        stage: set by the owner.
        num_held: reserved samples, of admitted calls that have not submitted them yet.
    """

    def __init__(self, max_open: int) -> None:
        self.max_open = max_open
        self.stage = Stage.WARMING_UP
        self.num_held = 0
        self._ends: deque[float] = deque(maxlen=_NUM_ENDS)

    def admit(self, num_open: int, num_samples: int) -> None:
        """Raise an error if a call cannot be admitted now.

        Args:
            num_open: samples that run and wait.
            num_samples: of the call.

        Raises:
            NotServingError: the server is not ready.
            QueueFullError: too many samples would be open. A call of any size is admitted if none are open.
        """
        if self.stage is not Stage.READY:
            raise NotServingError(self.stage)
        num_taken = num_open + self.num_held
        if num_taken and num_taken + num_samples > self.max_open:
            excess = num_taken + num_samples - self.max_open
            raise QueueFullError(
                f"expected at most {self.max_open} requests at the same time, got {num_samples} more than "
                f"the {num_taken} that run, wait or are prepared",
                self._wait_for(excess),
            )

    @contextmanager
    def held(self, num_samples: int) -> Iterator[None]:
        """Context manager that reserves samples of an admitted call, until it submits them."""
        self.num_held += num_samples
        try:
            yield
        finally:
            self.num_held -= num_samples

    def ended(self, num_samples: int) -> None:
        """Count ended samples, to estimate waiting times."""
        self._ends.extend([time.monotonic()] * num_samples)

    def _wait_for(self, num_samples: int) -> int:
        """Estimated seconds until a number of samples have ended, by the rate of the last ones."""
        if len(self._ends) < 2:
            return 1
        each = (time.monotonic() - self._ends[0]) / len(self._ends)
        return max(1, min(_LONGEST_WAIT_S, math.ceil(each * num_samples)))


class RequestFailedError(Exception):
    """An accepted request ended by an error, which is the ``__cause__``."""


class SlowReaderError(Exception):
    """A stream was read too slowly, and its requests were aborted."""


class AnswerTooLargeError(Exception):
    """The outputs of a call exceed their memory limit."""


class AnswerMemoryFullError(Exception):
    """The outputs of all calls together exceed their memory limit."""


class EngineDiedError(Exception):
    """The engine's thread has ended; nothing can be served any more."""


@dataclass(frozen=True)
class Submission:
    """A prompt, and how to continue it.

    Attributes:
        request_id: its id in the engine, unique among unfinished requests.
        prompt_token_ids, params: as for ``Engine.add_request``.
        score: of the prompt, by ``Engine.rank``; None if it is not computed.
        first_choice: index of its first sample among the choices of the answer; the others follow.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    first_choice: int = 0
    score: float | None = None


class TokenWatch(Protocol):
    """A listener for token latencies."""

    def first_token(self, seconds: float) -> None:
        """Time since the request arrived."""

    def next_token(self, seconds: float) -> None:
        """Time since the step of the previous token of the same choice."""


class Timing:
    """Timestamps of one call, by ``time.perf_counter``.

    Args:
        watch: notified of each token.

    Attributes:
        arrived: of the call.
        admitted: when the first of its prompts with a token was admitted; None before.
        first, last: of its first and its last token; None before.
    """

    def __init__(self, watch: TokenWatch | None = None) -> None:
        self.arrived = time.perf_counter()
        self.admitted: float | None = None
        self.first: float | None = None
        self.last: float | None = None
        self._watch = watch
        self._last_of: dict[int, float] = {}

    def came(self, choice: int, at: float, admitted_at: float | None = None) -> None:
        """Record a token of a choice.

        Further tokens of the same step are not reported to the watch: latencies are those between steps.

        Args:
            at: end of its step.
            admitted_at: when its prompt was admitted, if reported.
        """
        before = self._last_of.get(choice)
        self._last_of[choice] = self.last = at
        if self.first is None:
            self.first, self.admitted = at, admitted_at
        if self._watch is None:
            return
        if before is None:
            self._watch.first_token(at - self.arrived)
        elif at != before:
            self._watch.next_token(at - before)
