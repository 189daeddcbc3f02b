"""The facts about one call, for metrics, logs and traces."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpu_duo.server.protocol import ApiError
from hpu_duo.server.running.timing import Timing

if TYPE_CHECKING:
    from hpu_duo.server.planning import Plan
    from hpu_duo.server.running import Holding


@dataclass
class CallRecord:
    """One call that wants something generated, from its arrival to its end.

    Attributes:
        path: of the endpoint.
        timing: of its tokens.
        headers: of the request that traces go by.
        plan: what it came to; None if it was refused before that was known.
        holding: of its outputs; None if it was refused before there could be any.
        is_opened: whether it was taken; what is refused, such as for a full queue, has not run.
        error: what it was answered with in place of an answer, or in the middle of one.
        is_cut: the caller went away.
        ended: when it was over, by ``time.perf_counter``.
        ended_at: the same in seconds since 1970.
    """

    path: str
    timing: Timing
    headers: dict[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    holding: Holding | None = None
    is_opened: bool = False
    error: ApiError | None = None
    is_cut: bool = False
    ended: float = 0.0
    ended_at: float = 0.0

    def end(self) -> None:
        """Note that it is over."""
        self.ended, self.ended_at = time.perf_counter(), time.time()

    @property
    def seconds(self) -> float:
        """From its arrival to its end."""
        return self.ended - self.timing.arrived

    @property
    def reasons(self) -> list[str]:
        """Why its choices ended; those that did not end by themselves were aborted or failed."""
        if self.plan is None or not self.is_opened:
            return []
        reasons = [reason.value for reason in self.plan.answer.finish_reasons]
        unended = "error" if self.error is not None else "abort"
        return reasons + [unended] * (len(self.plan.answer.choices) - len(reasons) if self.plan.params else 0)
