"""One JSON line per call, written in a thread."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import IO, TYPE_CHECKING, Any

from hpu_duo.server.protocol import ApiError
from hpu_duo.server.running.admission import Timing

if TYPE_CHECKING:
    from hpu_duo.server.planning import Plan
    from hpu_duo.server.running import Holding

_log = logging.getLogger(__name__)

_MOST_WAITING = 10_000
_PATIENCE_S = 5.0
"""Most queued lines, for slow disks; more are dropped and counted."""


class RequestLog:
    """Writes a line for each completed call; no call waits for it or fails because of it.

    It has no prompts (unless enabled), no answers, and no messages of errors, which may quote a call.

    Args:
        file: appended to; None is standard output.
        has_prompts: write the prompts as well.
        patience_s: timeout of ``close`` for a blocked file.

    Attributes:
        on_lost: called for each line that could not be written, as on a full disk.
    """

    def __init__(
        self, file: Path | None, *, has_prompts: bool = False, patience_s: float = _PATIENCE_S
    ) -> None:
        self._file, self._has_prompts, self._patience_s = file, has_prompts, patience_s
        self.on_lost: Callable[[], None] = lambda: None
        self._lines: Queue[tuple[dict[str, Any], Plan | None] | None] = Queue(_MOST_WAITING)
        self._has_warned = False
        self._thread = Thread(target=self._run, name="hpu-duo-log", daemon=True)
        self._thread.start()

    def add(self, record: CallRecord) -> None:
        """Queue the line of a call."""
        try:
            self._lines.put_nowait((self._fields(record), record.plan if self._has_prompts else None))
        except Full:
            self.on_lost()

    def close(self) -> None:
        """Write queued lines and close; a blocked file is abandoned after a timeout."""
        with suppress(Full):
            self._lines.put(None, timeout=self._patience_s)
        self._thread.join(self._patience_s)

    def _fields(self, record: CallRecord) -> dict[str, Any]:
        plan, timing = record.plan, record.timing
        ended_at = datetime.fromtimestamp(record.ended_at, timezone.utc)
        fields: dict[str, Any] = {
            "time": ended_at.isoformat(timespec="milliseconds"),
            "request_id": record.headers.get("x-request-id"),
            "path": record.path,
            "status": 200 if record.error is None else record.error.status,
            "error": None if record.error is None else record.error.code,
            "param": None if record.error is None else record.error.param,
            "is_cut": record.is_cut,
            "seconds": round(record.seconds, 6),
            "queue_seconds": _between(timing.arrived, timing.admitted),
            "first_token_seconds": _between(timing.arrived, timing.first),
        }
        if plan is None:
            return fields
        usage = plan.answer.usage
        fields |= {
            "id": plan.answer_id,
            "model": plan.model,
            "user": plan.user,
            "stream": plan.is_streamed,
            "choices": len(plan.answer.choices),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish_reasons": record.reasons,
        }
        return fields

    def _run(self) -> None:
        opened: IO[str] | None = None
        while (record := self._lines.get()) is not None:
            try:
                opened = opened or self._open()
                opened.write(_line(*record))
                opened.flush()
            except (OSError, ValueError) as error:
                self._lose(error)
                opened = None
        if opened is not None and self._file is not None:
            opened.close()

    def _open(self) -> IO[str]:
        return sys.stdout if self._file is None else self._file.open("a", encoding="utf-8")

    def _lose(self, error: Exception) -> None:
        self.on_lost()
        if not self._has_warned:
            self._has_warned = True
            _log.warning("the log of calls cannot be written; calls are served nevertheless: %s", error)


def _line(fields: dict[str, Any], plan: Plan | None) -> str:
    if plan is not None:
        fields["prompts"] = list(plan.texts()) or [list(map(int, prompt)) for prompt in plan.prompts]
    return json.dumps(fields, ensure_ascii=False) + "\n"


def _between(begin: float, end: float | None) -> float | None:
    return None if end is None else round(end - begin, 6)


@dataclass
class CallRecord:
    """The record of a generating call, from its arrival to its end.

    Attributes:
        path: of the endpoint.
        timing: of its tokens.
        headers: trace headers of the request.
        plan: of the call; None if it was rejected before.
        holding: account of its outputs; None if it was rejected before.
        is_opened: whether it was accepted; rejected calls, as for a full queue, have not run.
        error: error response, or error event of a stream.
        is_cut: whether the caller disconnected.
        ended: end of the call, by ``time.perf_counter``.
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
        """Record the end."""
        self.ended, self.ended_at = time.perf_counter(), time.time()

    @property
    def seconds(self) -> float:
        """From its arrival to its end."""
        return self.ended - self.timing.arrived

    @property
    def reasons(self) -> list[str]:
        """Finish reasons of its choices; unfinished ones were aborted or failed."""
        if self.plan is None or not self.is_opened:
            return []
        reasons = [reason.value for reason in self.plan.answer.finish_reasons]
        unended = "error" if self.error is not None else "abort"
        return reasons + [unended] * (len(self.plan.answer.choices) - len(reasons) if self.plan.params else 0)
