"""Pieces of bodies, written without waking a task."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from hpu_duo.server.responding.event_sender import WRITE, Write


class DirectWrites:
    """Gives responses a function that writes a piece of a body at once, where a connection takes it.

    It goes by how uvicorn sends: ``send`` waits while a connection is paused, before it has written
    anything, and then writes without waiting. So one that waits is aborted, and nothing was written.

    Args:
        app: behind it, served by uvicorn.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] == "http":
            scope.setdefault("extensions", {})[WRITE] = _writer(send)
        await self._app(scope, receive, send)


def _writer(send: Send) -> Write:
    def write(data: bytes) -> bool:
        sending = send({"type": "http.response.body", "body": data, "more_body": True}).__await__()
        try:
            next(sending)
        except StopIteration:
            return True
        sending.close()
        return False

    return write
