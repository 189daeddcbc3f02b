"""From a plan to a response: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hpu_duo.server.answers import DONE, event
from hpu_duo.server.planning import Plan
from hpu_duo.server.responding.errors import as_api_error
from hpu_duo.server.responding.event_sender import EventSender
from hpu_duo.server.responding.presence import watched
from hpu_duo.server.running import ChoiceOutput, OutputStream, SlowReaderError
from hpu_duo.server.telemetry.record import CallRecord

_PIECE = 64 * 2**10
"""Bytes of a body that are given to the connection at once."""
_EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Neither caches nor proxies are to hold events back."""


class PlannedResponse(Response):
    """The answer to a plan whose requests are on their way.

    When the caller goes away, its requests are aborted, whatever has been sent.

    Args:
        plan: says how to answer.
        stream: outputs; None when nothing is generated.
        record: of the call.
        ended: called with the record when all is over.
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
        """Send it."""
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
            return  # nobody is there
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
        """Return what ends the task that sends."""
        task = asyncio.current_task()
        assert task is not None, "responses are sent by tasks"
        return task.cancel

    def _let_others_cut(self, cancel: Callable[[], object]) -> None:
        if (holding := self._record.holding) is not None:
            holding.on_ended = lambda _: cancel()

    def _is_cut_for_others(self) -> bool:
        """Whether the response is cancelled since its caller takes too little of it.

        The socket takes nothing, so that there is no way to tell; the server closes the connection.
        """
        holding, error = self._record.holding, None if self._stream is None else self._stream.error
        if not isinstance(error, SlowReaderError):
            error = None if holding is None else holding.error
        if error is not None:
            self._record.error = as_api_error(error)
        return error is not None

    async def _send_events(self, scope: Scope, send: Send) -> None:
        """Send events; an error behind the first of them is the last one, since the status is out."""
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
            # Without the event that ends an answer: what is cut short cannot be taken for whole.
            await sender.tell(event(self._record.error.body), is_last=True)

    async def _batches(self) -> AsyncIterator[list[ChoiceOutput]]:
        if self._stream is None:
            return
        while (batch := await self._stream.read()) is not None:
            yield batch


async def _send_json(data: bytes, send: Send) -> None:
    """Send a body in pieces, each of them once the caller has taken most of what came before."""
    start = Response(media_type="application/json", headers={"Content-Length": str(len(data))})
    await send({"type": "http.response.start", "status": 200, "headers": start.raw_headers})
    for piece in _pieces(data):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _pieces(data: bytes) -> Iterator[bytes]:
    return (data[begin : begin + _PIECE] for begin in range(0, len(data), _PIECE))
