"""Names of calls: ``X-Request-Id``, read and returned."""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "x-request-id"
_MOST = 256


class RequestIdMiddleware:
    """Gives each call the header that its caller left out or has no proper one of, and returns it.

    Args:
        app: behind it; an id that its response has is returned in place of the call's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        name = given if _is_proper(given) else uuid.uuid4().hex
        others = [pair for pair in scope["headers"] if pair[0] != REQUEST_ID.encode()]
        scope["headers"] = [*others, (REQUEST_ID.encode(), name.encode())]

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault(REQUEST_ID, name)
            await send(message)

        await self._app(scope, receive, named)


def _is_proper(name: str) -> bool:
    return 0 < len(name) <= _MOST and name.isascii() and name.isprintable()
