"""Bodies that are too long."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hpu_duo.server.http.errors import of_status
from hpu_duo.server.responding import error_response


class BodyLimitMiddleware:
    """Answers 413 to bodies that are longer than they may be, as soon as that is known.

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
            await error_response(of_status(self._refusal()))(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._refusal()
            return message

        await self._app(scope, counted, send)

    def _refusal(self) -> HTTPException:
        # What is left of the body is not read, so the connection cannot be used again.
        message = f"expected a body of at most {self._max_bytes:,} bytes"
        return HTTPException(413, message, {"Connection": "close"})
