"""Events of a stream, on their way to a connection."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.types import Scope, Send

from hpu_duo.server.answers import KEEP_ALIVE, Answer
from hpu_duo.server.running import ChoiceOutput

Write = Callable[[bytes], bool]
"""Writes a piece of a body that goes on, without waiting; says whether the connection took it."""

WRITE = "hpu_duo.write"
"""Name of a ``Write`` among the extensions of an ASGI scope."""


class EventSender:
    """Sends events: by plain calls while the connection takes them, otherwise by a task that waits for it.

    Args:
        answer: writes outputs as events.
        scope, send: of the connection.
        quiet_s: seconds of silence after which a comment is sent.
    """

    def __init__(self, answer: Answer, scope: Scope, send: Send, quiet_s: float) -> None:
        self._answer, self._send, self._quiet_s = answer, send, quiet_s
        extensions: dict[str, Any] = scope.get("extensions") or {}
        self._write: Write | None = extensions.get(WRITE)
        self._unsent = b""
        self._told_at = time.monotonic()

    def take(self, batch: list[ChoiceOutput]) -> bool:
        """Send the events of outputs at once; if the connection takes nothing, ``add`` sends them."""
        events = self._events(batch)
        if events and (self._write is None or not self._write(events)):
            self._unsent = events
            return False
        return True

    async def add(self, batch: list[ChoiceOutput]) -> None:
        """Send the events of outputs, behind those that could not be sent at once."""
        events, self._unsent = self._unsent + self._events(batch), b""
        if events:
            await self.tell(events)

    async def tell(self, data: bytes, *, is_last: bool = False) -> None:
        """Send a piece of the body."""
        self._told_at = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    def _events(self, batch: list[ChoiceOutput]) -> bytes:
        now = time.monotonic()
        events = self._answer.events(batch)
        if not events and now - self._told_at >= self._quiet_s:
            events = KEEP_ALIVE
        if events:
            self._told_at = now
        return events
