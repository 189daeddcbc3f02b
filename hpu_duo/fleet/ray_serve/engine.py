"""One replica, and calls of its application without a connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

from starlette.types import ASGIApp, Message, Scope

from hpu_duo.fleet.ray_serve.arguments import EngineSettings
from hpu_duo.server.http.auth import PREFIX_NAMESPACE
from hpu_duo.server.running.admission import Stage


@dataclass(frozen=True)
class EngineCall:
    """A call that is passed on to an engine.

    Attributes:
        method: of the request.
        path, query: of its address, as they were sent.
        headers: in any case.
        body: the whole body.
        prefix_namespace: calls of different ones share no cached prefix.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] | None = None
    body: bytes = b""
    prefix_namespace: str | None = None

    @property
    def scope(self) -> Scope:
        """The call as an ASGI application sees it."""
        headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self._headers]
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": unquote(self.path),
            "raw_path": self.path.encode("latin-1"),
            "query_string": self.query.encode("latin-1"),
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
            PREFIX_NAMESPACE: self.prefix_namespace,
        }

    @property
    def _headers(self) -> list[tuple[str, str]]:
        return list((self.headers or {}).items())


@dataclass(frozen=True)
class Head:
    """Status and headers of a response.

    Attributes:
        status: of the response.
        headers: names in lower case.
    """

    status: int
    headers: Mapping[str, str]


def below_prefix(scope: Scope) -> Scope:
    """Return a call without the prefix of its path."""
    prefix: str = scope.get("root_path", "")
    path: str = scope["path"]
    raw: bytes = scope.get("raw_path") or quote(path).encode()
    if prefix and path.startswith(prefix):
        path, raw = path[len(prefix) :] or "/", raw.removeprefix(quote(prefix).encode()) or b"/"
    return {**scope, "path": path, "raw_path": raw, "root_path": ""}


async def exchange(app: ASGIApp, call: EngineCall) -> AsyncIterator[Head | bytes]:
    """Run an ASGI application for a call: yields the head, then the body in available chunks.

    Closing the iterator counts as a disconnect of the caller.

    Raises:
        RuntimeError: the application ended before its response; its own error is the cause.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    is_left = asyncio.Event()
    unread: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await is_left.wait()
        return {"type": "http.disconnect"}

    async def serve() -> None:
        try:
            await app(call.scope, receive, messages.put)
        finally:
            messages.put_nowait(None)

    serving = asyncio.create_task(serve())
    is_complete = is_ended = False
    try:
        while not (is_complete or is_ended):
            batch, body = [await messages.get()], b""
            while not messages.empty():
                batch.append(messages.get_nowait())
            is_ended = batch[-1] is None
            for message in filter(None, batch):
                if message["type"] == "http.response.start":
                    names = message["headers"]
                    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in names}
                    yield Head(message["status"], headers)
                else:
                    body += message.get("body", b"")
                    is_complete = not message.get("more_body", False)
            if body:
                yield body
        if not is_complete:
            cause = (await asyncio.gather(serving, return_exceptions=True))[0]
            raise RuntimeError("the application ended before its response") from cause
    finally:
        is_left.set()
        if not is_complete:
            serving.cancel()
        # After the response, the application records the call; its errors are part of the response.
        await asyncio.gather(serving, return_exceptions=True)


_log = logging.getLogger(__name__)

_LOOK_S = 0.05


class Engine:
    """A deployment of Ray Serve: one replica is one engine.

    A replica accepts calls once every shape is captured. It is unhealthy when its engine has ended, and Ray
    starts another one in its place.

    Args:
        settings: of model and server.
    """

    # Ray awaits it.
    async def __init__(self, settings: EngineSettings) -> None:  # type: ignore[misc]
        # Everything that needs torch is imported where a model is served.
        from hpu_duo.llm import HPUDuoModel
        from hpu_duo.server.http.routes import create_app
        from hpu_duo.server.service import Service

        loaded = HPUDuoModel.from_pretrained(settings.path, **settings.engine)
        for note in loaded.engine.notes:
            _log.info("%s", note)
        self._service = Service(loaded, settings.server)
        self._app = create_app(self._service)
        await self._service.start(settings.warm_up and loaded.engine.runner.executor.uses_table)
        while self._service.stage is Stage.WARMING_UP:
            await asyncio.sleep(_LOOK_S)
        await self.check_health()

    async def answer(self, ticket: None, call: EngineCall) -> AsyncIterator[Head | bytes]:
        """Serve a call: yields the head, then the body.

        Args:
            ticket: of the ingress and its router; None here.
        """
        async for piece in exchange(self._app, call):
            yield piece

    async def check_health(self) -> None:
        """Health check of Ray.

        Raises:
            RuntimeError: it cannot, and never will again.
        """
        if self._service.stage is Stage.FAILED:
            raise RuntimeError("the engine has ended; the log of the replica has the reason")

    async def __del__(self) -> None:
        if service := self.__dict__.get("_service"):
            await service.stop()
