"""Responses of plans and errors: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from hpu_duo.sampling import FieldError
from hpu_duo.server.answers import DONE, KEEP_ALIVE, Answer, event
from hpu_duo.server.planning import Plan
from hpu_duo.server.protocol import ApiError, bad_value, failed, too_busy, unavailable
from hpu_duo.server.running import (
    AnswerMemoryFullError,
    AnswerTooLargeError,
    ChoiceOutput,
    EngineDiedError,
    OutputStream,
    RequestFailedError,
    SlowReaderError,
)
from hpu_duo.server.running.admission import NotServingError, QueueFullError, Stage
from hpu_duo.server.telemetry.request_log import CallRecord

_log = logging.getLogger(__name__)

_STARTING_S, _STOPPING_S, _FULL_S = 5, 1, 1


def error_response(error: ApiError) -> Response:
    """An error as a response."""
    return JSONResponse(error.body, error.status, headers=error.headers)


def as_api_error(error: Exception) -> ApiError:
    """Convert any error to one for the caller; unexpected ones are logged, and reported as internal."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return too_busy(str(error), error.retry_after_s)
        case NotServingError(stage=stage):
            wait = {Stage.WARMING_UP: _STARTING_S, Stage.DRAINING: _STOPPING_S}.get(stage)
            return unavailable(str(error), wait)
        case EngineDiedError():
            return unavailable(str(error))
        case RequestFailedError(__cause__=FieldError() as cause):
            return bad_value(cause.field, str(cause))
        case AnswerTooLargeError():
            return ApiError(400, str(error), code="answer_too_large")
        case AnswerMemoryFullError():
            return unavailable(str(error), _FULL_S, code="answer_memory_full")
        case RequestFailedError() | SlowReaderError():
            return failed(str(error))
        case _:
            _log.error("a call has failed", exc_info=error)
            return failed(f"{type(error).__name__} in the server; its log says more")


Write = Callable[[bytes], bool]
"""Writes a piece of a body, not the last one, without waiting; returns whether the connection was
writable."""

WRITE = "hpu_duo.write"
"""Key of a ``Write`` in the extensions of an ASGI scope."""


class EventSender:
    """Sends events: synchronously while the connection is writable, otherwise in a task that waits.

    Args:
        answer: encodes outputs as events.
        scope, send: of the connection.
        quiet_s: seconds of silence after which a comment is sent.
    """

    def __init__(self, answer: Answer, scope: Scope, send: Send, quiet_s: float) -> None:
        self._answer, self._send, self._quiet_s = answer, send, quiet_s
        extensions: dict[str, Any] = scope.get("extensions") or {}
        self._write: Write | None = extensions.get(WRITE)
        self._unsent = b""
        self._last_event_at = time.monotonic()

    def take(self, batch: list[ChoiceOutput]) -> bool:
        """Send the events of outputs synchronously; if the connection is not writable, ``add`` sends them."""
        events = self._events(batch)
        if events and (self._write is None or not self._write(events)):
            self._unsent = events
            return False
        return True

    async def add(self, batch: list[ChoiceOutput]) -> None:
        """Send the events of outputs, after those that could not be sent synchronously."""
        events, self._unsent = self._unsent + self._events(batch), b""
        if events:
            await self.tell(events)

    async def tell(self, data: bytes, *, is_last: bool = False) -> None:
        """Send a piece of the body."""
        self._last_event_at = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    def _events(self, batch: list[ChoiceOutput]) -> bytes:
        now = time.monotonic()
        events = self._answer.events(batch)
        if not events and now - self._last_event_at >= self._quiet_s:
            events = KEEP_ALIVE
        if events:
            self._last_event_at = now
        return events


_T = TypeVar("_T")


class CallerGoneError(Exception):
    """The caller has disconnected."""


@asynccontextmanager
async def watched(receive: Receive, gone: Callable[[], object]) -> AsyncIterator[None]:
    """Context manager that calls a function if the caller disconnects."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone()

    watcher = asyncio.create_task(wait())
    try:
        yield
    finally:
        watcher.cancel()


async def while_there(receive: Receive, work: Awaitable[_T]) -> _T:
    """Await something for a caller, and cancel it if the caller disconnects.

    Raises:
        CallerGoneError: the caller has disconnected.
    """
    task, is_gone = asyncio.current_task(), False
    assert task is not None, "expected a task"

    def gone() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    try:
        async with watched(receive, gone):
            return await work
    except asyncio.CancelledError:
        if not is_gone:
            raise
        if sys.version_info >= (3, 11):
            task.uncancel()
        raise CallerGoneError from None


_PIECE = 64 * 2**10
"""Bytes of a body that are passed to the connection at a time."""
_EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Caches and proxies must not buffer events."""


class PlannedResponse(Response):
    """The response of a plan with submitted requests.

    If the caller disconnects, its requests are aborted.

    Args:
        plan: of the call.
        stream: outputs; None if nothing is generated.
        record: of the call.
        ended: called with the record at the end.
        quiet_s: seconds of silence after which a stream gets a comment.
    """

    def __init__(
        self,
        plan: Plan,
        stream: OutputStream | None,
        record: CallRecord,
        ended: Callable[[CallRecord], None],
        quiet_s: float,
    ) -> None:
        super().__init__()
        self._quiet_s = quiet_s
        self._plan, self._stream, self._record, self._ended = plan, stream, record, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        record = self._record
        try:
            async with nullcontext() if self._stream is None else watched(receive, self._stream.close):
                if self._plan.is_streamed:
                    await self._send_events(scope, send)
                else:
                    await self._send_body(send)
        except Exception as error:
            record.error = as_api_error(error)
            raise record.error from error
        finally:
            if self._stream is not None:
                record.is_cut = self._stream.is_closed
                self._stream.close()
            self._ended(record)

    async def _send_body(self, send: Send) -> None:
        answer = self._plan.answer
        async for batch in self._batches():
            answer.add(batch)
        if self._stream is not None and self._stream.is_closed:
            return  # the caller has disconnected
        data = answer.body() if answer.is_short else await asyncio.to_thread(answer.body)
        holding = self._record.holding
        if holding is not None and holding.error is not None:
            raise holding.error
        self._let_others_cut(self._cancel())
        try:
            await _send_json(data, send)
        except asyncio.CancelledError:
            if not self._is_cut_for_others():
                raise

    def _cancel(self) -> Callable[[], object]:
        """Return the function that cancels the sending task."""
        task = asyncio.current_task()
        assert task is not None, "expected a task"
        return task.cancel

    def _let_others_cut(self, cancel: Callable[[], object]) -> None:
        if (holding := self._record.holding) is not None:
            holding.on_ended = lambda _: cancel()

    def _is_cut_for_others(self) -> bool:
        """Whether the response is cancelled because its caller reads too slowly.

        The socket is not writable, so no error can be sent; the server closes the connection.
        """
        holding, error = self._record.holding, None if self._stream is None else self._stream.error
        if not isinstance(error, SlowReaderError):
            error = None if holding is None else holding.error
        if error is not None:
            self._record.error = as_api_error(error)
        return error is not None

    async def _send_events(self, scope: Scope, send: Send) -> None:
        """Send events; an error after the first of them is the last event, since the status is sent."""
        answer = self._plan.answer
        start = Response(media_type="text/event-stream", headers=_EVENT_HEADERS)
        headers = [pair for pair in start.raw_headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sender = EventSender(answer, scope, send, self._quiet_s)
        if self._stream is not None:
            self._stream.on_slow = self._cancel()
        else:
            self._let_others_cut(self._cancel())
        try:
            begin = answer.beginning
            beginning = begin() if answer.is_short else await asyncio.to_thread(begin)
            for piece in _pieces(beginning):
                await sender.tell(piece)
            while self._stream is not None and (batch := await self._stream.read(sender.take)) is not None:
                await sender.add(batch)
            await sender.tell(answer.ending() + DONE, is_last=True)
        except asyncio.CancelledError:
            if not self._is_cut_for_others():
                raise
        except Exception as error:
            self._record.error = as_api_error(error)
            # Without ``[DONE]``, so that a truncated answer cannot be mistaken for a complete one.
            await sender.tell(event(self._record.error.body), is_last=True)

    async def _batches(self) -> AsyncIterator[list[ChoiceOutput]]:
        if self._stream is None:
            return
        while (batch := await self._stream.read()) is not None:
            yield batch


async def _send_json(data: bytes, send: Send) -> None:
    """Send a body in pieces, each once the caller has read most of the previous ones."""
    start = Response(media_type="application/json", headers={"Content-Length": str(len(data))})
    await send({"type": "http.response.start", "status": 200, "headers": start.raw_headers})
    for piece in _pieces(data):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _pieces(data: bytes) -> Iterator[bytes]:
    return (data[begin : begin + _PIECE] for begin in range(0, len(data), _PIECE))


__all__ = ["CallerGoneError", "PlannedResponse", "as_api_error", "error_response", "while_there"]
