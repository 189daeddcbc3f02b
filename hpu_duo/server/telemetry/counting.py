"""Responses, counted."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

Count = Callable[[str, str, int], None]
"""Called with method, path of the route, and status."""

_UNKNOWN = "other"


class CountingMiddleware:
    """Tells of each response.

    Args:
        app: behind it.
        count: told.
    """

    def __init__(self, app: ASGIApp, count: Count) -> None:
        self._app, self._count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Paths of callers are without number; routes are few.
                route = scope.get("route")
                path = getattr(route, "path", _UNKNOWN)
                method = scope["method"] if path != _UNKNOWN else _UNKNOWN
                self._count(method, path, message["status"])
            await send(message)

        await self._app(scope, receive, counted)
