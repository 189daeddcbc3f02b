"""Bodies that are too long, or hold too many values."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hpu_duo.server.http.errors import of_status
from hpu_duo.server.protocol.bounds import MAX_VALUES, ValueCount
from hpu_duo.server.responding import error_response


class BodyLimitMiddleware:
    """Answers 413 to bodies of more bytes or JSON values than they may have, as soon as that is known.

    A body of a few MiB may hold more values than a process has memory for, so they are counted before any
    is made.

    Args:
        app: behind it.
        max_bytes: most bytes of a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            await error_response(of_status(self._too_long()))(scope, receive, send)
            return
        num_bytes, values = 0, ValueCount()

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            body = message.get("body", b"")
            num_bytes += len(body)
            if num_bytes > self._max_bytes:
                raise self._too_long()
            if values.add(body) > MAX_VALUES:
                raise _refusal(f"expected a body of at most {MAX_VALUES:,} JSON values")
            return message

        await self._app(scope, counted, send)

    def _too_long(self) -> HTTPException:
        return _refusal(f"expected a body of at most {self._max_bytes:,} bytes")


def _refusal(message: str) -> HTTPException:
    # What is left of the body is not read, so the connection cannot be used again.
    return HTTPException(413, message, {"Connection": "close"})
