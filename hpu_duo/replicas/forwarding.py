"""A call on its way to a replica, and the answer on its way back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hpu_duo.replicas.events import WholeEvents, counts_of
from hpu_duo.replicas.prompts import RoutedCall
from hpu_duo.replicas.upstream import Answer, BrokenError, UnreachableError
from hpu_duo.routing import Dispatch, NoReplicaError
from hpu_duo.server.answers import event
from hpu_duo.server.protocol import ApiError
from hpu_duo.server.protocol.errors import unavailable
from hpu_duo.server.responding import error_response

if TYPE_CHECKING:
    from hpu_duo.replicas.front import Front

_OF_ONE_HOP = ("connection", "content-length", "transfer-encoding", "keep-alive", "date", "server")
_TURNED_AWAY = (429, 503)
"""Statuses with which a replica takes no call: another one may."""
_MOST_BREAKS = 2
"""Replicas that one call may be lost with: it may be why they ended."""


class ForwardedResponse(Response):
    """The answer of a replica to a call.

    A call that no replica has seen, or that one has turned away, goes to another one. One whose replica dies
    before anything was answered is sent once more. Behind the beginning of an answer, an error is told
    instead of the rest, and never the mark of an end. When the caller goes away, the replica is told.

    Args:
        front: has router and replicas.
        call: what the router goes by.
        method, path, body, headers: of the call.
    """

    def __init__(
        self, front: Front, call: RoutedCall, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._front, self._call = front, call
        self._method, self._path, self._body, self._asked = method, path, body, headers
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        self._front.counts.num_open += 1
        answering = asyncio.create_task(self._answer(scope, receive, send))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._front.counts.num_open -= 1
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled() and (error := answering.exception()) is not None:
            raise error

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        tried: list[str] = []
        refusal: Response = error_response(unavailable("no replica can serve now", 1))
        num_breaks = 0
        while num_breaks < _MOST_BREAKS:
            try:
                replica = self._front.choose(self._call, tried)
            except NoReplicaError:
                break
            sent = self._front.dispatched(self._call, replica)
            tried.append(replica)
            try:
                refused = await self._attempt(sent, send)
            except UnreachableError:
                self._front.counts.num_retries += 1
            except BrokenError:
                num_breaks += 1
                self._front.counts.num_broken += 1
                error = _lost(replica)
                if self._has_begun:
                    await self._end_with(error, send)
                    return
                refusal = error_response(error)
                self._front.counts.num_retries += num_breaks < _MOST_BREAKS
            else:
                if refused is None:
                    return
                refusal = refused
            finally:
                # Whatever has not been told to have finished has failed: an error, or nobody waits for it.
                self._front.router.failed(sent.request.request_id, self._front.now())
        await refusal(scope, receive, send)

    async def _attempt(self, sent: Dispatch, send: Send) -> Response | None:
        """Answer by a replica; returns the refusal of one that does not take the call."""
        url = self._front.url(sent.replica) + self._path
        async with self._front.upstream.call(self._method, url, self._body, self._asked) as answer:
            if answer.status in _TURNED_AWAY:
                return Response(await answer.body(), answer.status, _passed_back(answer))
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                await self._pass_events(sent, answer, send)
            else:
                await self._pass_body(sent, answer, send)
        return None

    async def _pass_body(self, sent: Dispatch, answer: Answer, send: Send) -> None:
        """Send a whole body, once all of it is there."""
        body = await answer.body()
        if answer.status == 200:
            self._front.answered(sent)
            self._front.finished(sent, counts_of(body))
        self._has_begun = True
        whole = Response(body, answer.status, _passed_back(answer))
        await send({"type": "http.response.start", "status": answer.status, "headers": whole.raw_headers})
        await send({"type": "http.response.body", "body": body})

    async def _pass_events(self, sent: Dispatch, answer: Answer, send: Send) -> None:
        """Send events as they come; reading waits for a caller who is slow."""
        events = WholeEvents()
        headers = [(name.encode(), value.encode()) for name, value in _passed_back(answer).items()]
        try:
            async for piece in _until_done(answer, events):
                if not (whole := events.feed(piece)):
                    continue
                if not self._has_begun:
                    self._has_begun = True
                    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
                if events.has_data:
                    self._front.answered(sent)
                if events.is_done:
                    # Before the caller sees the end, so that its next call finds the load without this one.
                    self._front.finished(sent, events.counts)
                await send({"type": "http.response.body", "body": whole, "more_body": True})
        except asyncio.CancelledError:
            # The caller has left: what was answered by then was work, and is charged for.
            if events.has_data:
                self._front.finished(sent, events.counts)
            raise
        if events.is_error:
            self._front.counts.num_failed += 1
        elif not events.is_done:
            raise BrokenError("the stream ended without its last event")
        await send({"type": "http.response.body", "body": b""})

    async def _end_with(self, error: ApiError, send: Send) -> None:
        """Tell of an error behind the beginning of a stream."""
        await send({"type": "http.response.body", "body": event(error.body), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _lost(replica: str) -> ApiError:
    return ApiError(
        503,
        f"replica {replica} was lost before its answer had ended: the answer is not complete",
        kind="server_error",
        code="replica_lost",
        headers={"Retry-After": "1"},
    )


def _passed_back(answer: Answer) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name not in _OF_ONE_HOP}


async def _until_done(answer: Answer, events: WholeEvents) -> AsyncIterator[bytes]:
    """Pieces of a stream; what breaks behind its last event breaks nothing."""
    try:
        async for piece in answer.pieces():
            yield piece
    except BrokenError:
        if not events.is_done:
            raise


async def _gone(receive: Receive) -> None:
    """Wait until the caller has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
