"""Calls to replicas over HTTP, and their answers on the way to the caller."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import aiohttp
from pydantic_core import from_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hpu_duo.server.answers import event
from hpu_duo.server.protocol import ApiError
from hpu_duo.server.running.stream import ENDED


class UnreachableError(Exception):
    """A replica was not there: it has not seen the call."""


class BrokenError(Exception):
    """The connection ended before the response."""


class Answer(Protocol):
    """A response with its head, and a body that is read lazily."""

    @property
    def status(self) -> int:
        """Status of the response."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the response; names in lower case."""
        ...

    async def body(self) -> bytes:
        """All of the body.

        Raises:
            BrokenError: it did not end as it should.
        """
        ...

    def pieces(self) -> AsyncIterator[bytes]:
        """The body in chunks, with backpressure.

        Raises:
            BrokenError: it did not end as it should.
        """
        ...


_DONE = b"[DONE]"


@dataclass
class AnswerCounts:
    """Tokens of a response, by its usage.

    Attributes:
        num_outputs: tokens; of a stream without usage, events.
        num_cached_share: share of the prompt that the replica had cached; None if it has no usage.
    """

    num_outputs: int = 0
    num_cached_share: float | None = None

    def take_usage(self, usage: Any) -> None:
        """Parse the object ``usage`` of a response, if valid."""
        try:
            self.num_outputs = int(usage["completion_tokens"])
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            self.num_cached_share = min(1.0, int(cached) / int(usage["prompt_tokens"]))
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return


class WholeEvents:
    """Splits a stream into whole events.

    An incomplete event of a broken connection is never forwarded, so that an error event may follow.

    Attributes:
        counts: of the response so far.
        has_data: whether there was an event with data.
        is_done: whether there was the final event.
        is_error: whether the last event with data is an error.
    """

    def __init__(self) -> None:
        self.counts = AnswerCounts()
        self.has_data = self.is_done = self.is_error = False
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """Parse a chunk; returns the events that it completes."""
        data = self._rest + piece
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._rest = data
            return b""
        self._rest = data[end:]
        for block in data[:end].split(b"\n\n"):
            if block.startswith(b"data:"):
                self._take(block.removeprefix(b"data:").strip())
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
    """The counts of a whole response."""
    counts = AnswerCounts()
    try:
        fields = from_json(body)
    except ValueError:
        return counts
    if isinstance(fields, dict):
        counts.take_usage(fields.get("usage"))
    return counts


DEPARTED = "departed"
"""Name under which replicas are counted together once they are no more."""


@dataclass
class FrontCounts:
    """Totals since the start; those of replicas by their names.

    Attributes:
        num_open: calls that are being answered.
        num_retries: calls that were sent to another replica.
        num_broken: responses of lost replicas.
        num_failed: streams that a replica has ended with an error.
        requests, prompt_tokens: sent ones, tokens if known.
        expected_tokens: those of them that the router expected to be cached.
        cached_tokens: of responses, by their usage.
        responses: of the front, by method, path and status.
    """

    num_open: int = 0
    num_retries: int = 0
    num_broken: int = 0
    num_failed: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: dict[str, float] = field(default_factory=dict)
    expected_tokens: dict[str, float] = field(default_factory=dict)
    cached_tokens: dict[str, float] = field(default_factory=dict)
    responses: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def responded(self, method: str, path: str, status: int) -> None:
        """Count a response."""
        self.responses[method, path, str(status)] += 1

    def depart(self, name: str) -> None:
        """Count a replica with all others that are no more: names of new ones would be more and more."""
        self.requests[DEPARTED] += self.requests.pop(name, 0)
        for totals in (self.prompt_tokens, self.expected_tokens, self.cached_tokens):
            add(totals, DEPARTED, totals.pop(name, 0.0))

    def joined(self, routed: FrontCounts) -> FrontCounts:
        """Return these numbers with those of replicas from elsewhere."""
        return replace(
            self,
            requests=routed.requests,
            prompt_tokens=routed.prompt_tokens,
            expected_tokens=routed.expected_tokens,
            cached_tokens=routed.cached_tokens,
        )


def add(totals: dict[str, float], name: str, value: float) -> None:
    """Add to the total of a name."""
    totals[name] = totals.get(name, 0.0) + value


_OF_ONE_HOP = ("connection", "content-length", "transfer-encoding", "keep-alive", "date", "server")
TURNED_AWAY = (429, 503)
"""Statuses of a rejection, after which another replica is tried."""
MOST_BREAKS = 2
"""Replicas that one call may be lost with: it may be why they ended."""


def has_run(refusal: Response) -> bool:
    """Whether a call was aborted for the memory of its answer, and must not be retried elsewhere."""
    return refusal.status_code == 503 and ENDED.encode() in bytes(refusal.body)


class Told(Protocol):
    """A listener for the progress of a response."""

    def answered(self) -> None:
        """Called at the start of a response."""
        ...

    def finished(self, counts: AnswerCounts) -> None:
        """Called at the end of a complete response."""
        ...


class Caller:
    """The caller's side of a call.

    Args:
        scope, receive, send: of the connection.

    Attributes:
        has_begun: whether any part of a response was sent.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.has_begun = False

    async def pass_on(self, answer: Answer, told: Told) -> bool:
        """Send a response, events as they arrive; returns whether it ends with an error of the replica.

        Raises:
            BrokenError: the replica was lost before the end of the response.
        """
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            return await self._pass_events(answer, told)
        await self._pass_body(answer, told)
        return False

    async def refuse(self, refusal: Response) -> None:
        """Send a response, where nothing was sent before."""
        await refusal(self._scope, self._receive, self._send)

    async def end_with(self, error: ApiError) -> None:
        """Send an error event after the start of a stream."""
        await self._send({"type": "http.response.body", "body": event(error.body), "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def _pass_body(self, answer: Answer, told: Told) -> None:
        """Send a body once it is complete."""
        body = await answer.body()
        if answer.status == 200:
            told.answered()
            told.finished(counts_of(body))
        self.has_begun = True
        whole = Response(body, answer.status, passed_back(answer))
        await self._send(
            {"type": "http.response.start", "status": answer.status, "headers": whole.raw_headers}
        )
        await self._send({"type": "http.response.body", "body": body})

    async def _pass_events(self, answer: Answer, told: Told) -> bool:
        """Send events as they arrive, with backpressure."""
        events = WholeEvents()
        headers = [(name.encode(), value.encode()) for name, value in passed_back(answer).items()]
        try:
            async for piece in _until_done(answer, events):
                if not (whole := events.feed(piece)):
                    continue
                if not self.has_begun:
                    self.has_begun = True
                    start = {"type": "http.response.start", "status": answer.status, "headers": headers}
                    await self._send(start)
                if events.has_data:
                    told.answered()
                if events.is_done:
                    # Before the caller sees the end, so that its next call finds the load without this one.
                    told.finished(events.counts)
                await self._send({"type": "http.response.body", "body": whole, "more_body": True})
        except asyncio.CancelledError:
            # The caller has left: what was answered by then was work, and is charged for.
            if events.has_data:
                told.finished(events.counts)
            raise
        if not events.is_error and not events.is_done:
            raise BrokenError("the stream ended without its last event")
        await self._send({"type": "http.response.body", "body": b""})
        return events.is_error


class RelayedResponse(Response):
    """The response of a replica to a call.

    A call that reached no replica, or was rejected by one, is sent to another one. If the replica dies before
    the response, the call is retried once. After the start of a response, an error is sent instead of the
    rest, and never the final event. When the caller disconnects, the replica aborts the request.

    Args:
        counts: of calls.
    """

    def __init__(self, counts: FrontCounts) -> None:
        super().__init__()
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        self._counts.num_open += 1
        answering = asyncio.create_task(self._answer(Caller(scope, receive, send)))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._counts.num_open -= 1
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled() and (error := answering.exception()) is not None:
            raise error

    @abstractmethod
    async def _answer(self, caller: Caller) -> None:
        """Respond by a replica; cancelled if the caller disconnects."""


def lost(replica: str) -> ApiError:
    """The error of a response of a lost replica."""
    return ApiError(
        503,
        f"replica {replica} was lost before the end of its answer: the answer is not complete",
        kind="server_error",
        code="replica_lost",
        headers={"Retry-After": "1"},
    )


def passed_back(answer: Answer) -> dict[str, str]:
    """Headers of a response that are forwarded to the caller."""
    return {name: value for name, value in answer.headers.items() if name not in _OF_ONE_HOP}


async def _until_done(answer: Answer, events: WholeEvents) -> AsyncIterator[bytes]:
    """Chunks of a stream; errors after its last event are ignored."""
    try:
        async for piece in answer.pieces():
            yield piece
    except BrokenError:
        if not events.is_done:
            raise


async def _gone(receive: Receive) -> None:
    """Wait until the caller disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


_CONNECT_S = 5.0


@dataclass(frozen=True)
class HttpAnswer:
    """A response with its head, and a body that is read lazily; see ``Answer``.

    Attributes:
        status, headers: of the response; names in lower case.
    """

    status: int
    headers: Mapping[str, str]
    _response: aiohttp.ClientResponse

    async def body(self) -> bytes:
        """All of the body.

        Raises:
            BrokenError: it did not end as it should.
        """
        try:
            return await self._response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise BrokenError(str(error)) from error

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body in chunks, with backpressure.

        Raises:
            BrokenError: it did not end as it should.
        """
        try:
            async for piece in self._response.content.iter_any():
                yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise BrokenError(str(error)) from error


class Upstream:
    """Connections to replicas; opened in an event loop, and closed there.

    Args:
        metrics_key: key for metrics and statistics of replicas; None for none.
    """

    def __init__(self, metrics_key: str | None = None) -> None:
        self._state_headers = {} if metrics_key is None else {"Authorization": f"Bearer {metrics_key}"}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    @asynccontextmanager
    async def call(
        self, method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[HttpAnswer]:
        """Call a replica; leaving the context before the end of the response cancels the call.

        Raises:
            UnreachableError: the connection was refused.
            BrokenError: the connection ended before the response.
        """
        try:
            response = await self._session.request(method, url, data=body or None, headers=headers)
        except aiohttp.ClientConnectorError as error:
            raise UnreachableError(str(error)) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BrokenError(str(error)) from error
        try:
            names = {name.lower(): value for name, value in response.headers.items()}
            yield HttpAnswer(response.status, names, response)
        finally:
            # Returned to the pool if all of it was read, else closed.
            response.release() if response.content.at_eof() else response.close()

    async def text(self, url: str, timeout_s: float) -> tuple[int, bytes] | None:
        """Fetch a short response; returns status and body, or None on a timeout."""
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.get(url, timeout=limit, headers=self._state_headers) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None
