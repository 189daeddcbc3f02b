"""Limits to what a server takes on, and prompts on their way to the engine."""

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
    """Stages of a server's life; ``ready`` alone takes requests."""

    WARMING_UP = "warming up"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class QueueFullError(Exception):
    """More samples are open than a server takes.

    Attributes:
        retry_after_s: when there may be room again, in whole seconds.
    """

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotServingError(Exception):
    """Requests are not taken now.

    Attributes:
        stage: why.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(f"the server is {stage.value}")
        self.stage = stage


class Admission:
    """Takes requests while the server is ready and the queue has room.

    Args:
        max_open: most samples that run and wait.

    Attributes:
        stage: set by the owner.
        num_held: samples that calls under way have a place for, and have not opened yet.
    """

    def __init__(self, max_open: int) -> None:
        self.max_open = max_open
        self.stage = Stage.WARMING_UP
        self.num_held = 0
        self._ends: deque[float] = deque(maxlen=_NUM_ENDS)

    def admit(self, num_open: int, num_samples: int) -> None:
        """Refuse a call if it comes at the wrong time.

        Args:
            num_open: samples that run and wait.
            num_samples: of the call.

        Raises:
            NotServingError: the server does not serve, or no longer.
            QueueFullError: too many samples would be open. One call is taken while none are, however large.
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
        """Keep places for samples of a call that was admitted, until it opens them behind the context."""
        self.num_held += num_samples
        try:
            yield
        finally:
            self.num_held -= num_samples

    def ended(self, num_samples: int) -> None:
        """Note that samples have ended, to tell how long others have to wait."""
        self._ends.extend([time.monotonic()] * num_samples)

    def _wait_for(self, num_samples: int) -> int:
        """Seconds until so many samples have ended, if they end as fast as the last ones did."""
        if len(self._ends) < 2:
            return 1
        each = (time.monotonic() - self._ends[0]) / len(self._ends)
        return max(1, min(_LONGEST_WAIT_S, math.ceil(each * num_samples)))


class RequestFailedError(Exception):
    """An error ended a request that had been accepted; it is the ``__cause__``."""


class SlowReaderError(Exception):
    """A stream was read so much slower than it was written that its requests were aborted."""


class AnswerTooLargeError(Exception):
    """The outputs of a call take more memory than they may."""


class AnswerMemoryFullError(Exception):
    """The outputs of all calls together take as much memory as they may."""


class EngineDiedError(Exception):
    """The engine's thread has ended, and nothing will be served any more."""


@dataclass(frozen=True)
class Submission:
    """A prompt, and how to continue it.

    Attributes:
        request_id: its name in the engine, unique among those under way.
        prompt_token_ids, params: as for ``Engine.add_request``.
        score: of the prompt, by ``Engine.rank``; None where it was not asked.
        first_choice: place of its first sample among the choices of the answer; the others follow.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    first_choice: int = 0
    score: float | None = None


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
