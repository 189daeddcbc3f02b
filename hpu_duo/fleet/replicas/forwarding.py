"""A call on its way to a replica over HTTP, and the answer on its way back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from hpu_duo.fleet.replicas.relaying import BrokenError, UnreachableError

_CONNECT_S = 5.0


@dataclass(frozen=True)
class HttpAnswer:
    """The beginning of an answer, and what is still to come; see ``Answer``.

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
        """The body piece by piece; it is read no faster than pieces are taken.

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
        metrics_key: with which replicas are asked for their metrics and statistics; None for none.
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
        """Call a replica; leaving the context before the answer has ended tells it that nobody waits.

        Raises:
            UnreachableError: nobody listens there.
            BrokenError: the connection ended before an answer began.
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
            # Back to the pool if all of it was read, else closed.
            response.release() if response.content.at_eof() else response.close()

    async def text(self, url: str, timeout_s: float) -> tuple[int, bytes] | None:
        """Get a short answer; returns status and body, or None if none came in time."""
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.get(url, timeout=limit, headers=self._state_headers) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None
