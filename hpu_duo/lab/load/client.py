"""The HTTP client: one request, one stream, one outcome."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from hpu_duo.lab.load.endpoint import DONE, Endpoint, StreamError, error_text
from hpu_duo.lab.load.outcome import Failure, Outcome
from hpu_duo.lab.load.plan import PlannedRequest
from hpu_duo.lab.load.sse import EventStream

_SHOWN_ERROR = 300


class ServerError(Exception):
    """The server cannot be reached, or gives no usable answer."""


class Client:
    """Connections to one server; to be entered with ``async with``.

    Args:
        address: such as ``http://127.0.0.1:8000``; a path in it stands before those of the endpoints. A final
            ``/v1``, as OpenAI's own clients want it, is understood.
        headers: of every request, an API key say.
        timeout_s: of a whole request, from sending to the last token; None = no limit.
        verify_tls: False accepts any certificate.

    Raises:
        ValueError: an invalid address.
    """

    def __init__(
        self,
        address: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        verify_tls: bool = True,
    ) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"expected an address such as http://127.0.0.1:8000, got {address!r}")
        self.address = address.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._tls: ssl.SSLContext | bool = verify_tls

    async def __aenter__(self) -> Client:
        """Open no connection yet: each is opened when it is needed, kept, and used again."""
        # As many connections as requests: a pool with a limit would close the loop.
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls, ttl_dns_cache=300, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=self._timeout, auto_decompress=True
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        await self._session.close()

    async def models(self, wait_s: float = 0.0) -> list[str]:
        """Ask for the names of the models.

        Args:
            wait_s: seconds to try again while the server does not answer or answers 503.

        Raises:
            ServerError: no answer, or none with models.
        """
        url = f"{self.address}/v1/models"
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            try:
                async with self._session.get(url) as answer:
                    text = await answer.text()
                    if answer.status == 200:
                        return [model["id"] for model in json.loads(text)["data"]]
                    problem = f"status {answer.status}: {_error_of(text)}"
                    is_final = answer.status != 503
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
                problem, is_final = _words(error), False
            except (ValueError, KeyError, TypeError):
                problem, is_final = f"no list of models: {text[:80]!r}", True
            if is_final or asyncio.get_running_loop().time() >= deadline:
                raise ServerError(f"cannot ask {url} for its models: {problem}")
            await asyncio.sleep(0.5)

    async def send(
        self, endpoint: Endpoint, request: PlannedRequest, outcome: Outcome, clock: Callable[[], float]
    ) -> None:
        """Send a request now, and record its answer.

        Errors of the server and of the network are recorded, never raised.

        Args:
            outcome: filled in as the answer comes.
            clock: seconds since the run began.
        """
        outcome.is_sent, outcome.failure, outcome.error = True, None, ""
        outcome.sent_s = outcome.end_s = clock()
        try:
            async with self._session.post(self.address + endpoint.value, data=request.body) as answer:
                outcome.status = answer.status
                if answer.status != 200:
                    _fail(outcome, Failure.STATUS, _error_of(await answer.text(errors="replace")))
                elif answer.content_type != "text/event-stream":
                    _fail(outcome, Failure.STREAM, f"expected an event stream, got {answer.content_type}")
                else:
                    await _read(answer, endpoint, outcome, clock)
        except asyncio.TimeoutError:
            _fail(outcome, Failure.TIMEOUT, f"no end within {self._timeout.total} s")
        except StreamError as error:
            _fail(outcome, Failure.STREAM, str(error))
        except (aiohttp.ClientPayloadError, ValueError) as error:
            _fail(outcome, Failure.STREAM, _words(error))
        except (aiohttp.ClientError, OSError) as error:
            _fail(outcome, Failure.CONNECTION, _words(error))
        except asyncio.CancelledError:
            _fail(outcome, Failure.INTERRUPTED, "the run was interrupted")
            raise
        finally:
            if not outcome.is_whole:
                outcome.end_s = clock()


async def _read(
    answer: aiohttp.ClientResponse, endpoint: Endpoint, outcome: Outcome, clock: Callable[[], float]
) -> None:
    """Read a stream to its end."""
    events = EventStream()
    has_ended = False
    async for data in answer.content.iter_any():
        now = clock()
        for event in events.feed(data):
            if event == DONE:
                has_ended = True
            else:
                piece = endpoint.read(event)
                outcome.take(piece, now)
                has_ended = has_ended or piece.is_end
    num_tokens = len(outcome.token_times_s)
    if not has_ended:
        raise StreamError(f"the stream ends after {num_tokens} tokens without a finish reason or [DONE]")
    if not num_tokens:
        raise StreamError("the stream ends without a token")


def _fail(outcome: Outcome, failure: Failure, error: str) -> None:
    outcome.failure, outcome.error = failure, error


def _error_of(body: str) -> str:
    """The message of an error body, or its beginning."""
    try:
        fields: Any = json.loads(body)
    except ValueError:
        return body[:_SHOWN_ERROR]
    error = fields.get("error", fields) if isinstance(fields, dict) else fields
    return error_text(error)[:_SHOWN_ERROR]


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
