"""The deployment that callers reach: reads calls, and passes them on to engines."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from hpu_duo import __version__
from hpu_duo.fleet.ray_serve.arguments import IngressSettings
from hpu_duo.fleet.ray_serve.engine import EngineCall, Head, below_prefix
from hpu_duo.fleet.ray_serve.shared_router import SharedRouter, Ticket, announced
from hpu_duo.fleet.replicas.app import text_of
from hpu_duo.fleet.replicas.front import RoutedCall, read_beside, read_call
from hpu_duo.fleet.replicas.relaying import (
    MOST_BREAKS,
    TURNED_AWAY,
    BrokenError,
    Caller,
    FrontCounts,
    RelayedResponse,
    has_run,
    lost,
    passed_back,
)
from hpu_duo.server.http.auth import PREFIX_NAMESPACE
from hpu_duo.server.http.middleware import add_guards, install_error_handlers
from hpu_duo.server.protocol import too_busy, unavailable
from hpu_duo.server.responding import error_response

_log = logging.getLogger(__name__)

_RETRY_S = 1


@dataclass(frozen=True)
class HandleAnswer:
    """Head of a response through a handle; see ``Answer``.

    Attributes:
        status, headers: of the response; names in lower case.
    """

    status: int
    headers: Mapping[str, str]
    _rest: AsyncIterator[bytes]

    async def body(self) -> bytes:
        """The whole body; see ``Answer``."""
        return b"".join([piece async for piece in self._rest])

    def pieces(self) -> AsyncIterator[bytes]:
        """The body in chunks; see ``Answer``."""
        return self._rest


class Engines:
    """The replicas, as the ingress calls them.

    Args:
        handle: of the deployment of ``Engine``.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._answers = handle.options(method_name="answer", stream=True)

    @asynccontextmanager
    async def call(self, ticket: Ticket, call: EngineCall) -> AsyncIterator[HandleAnswer]:
        """Call a replica; leaving the context before the end of the response cancels the call.

        Raises:
            BackPressureError: too many calls wait for a replica.
            BrokenError: the replica was lost before the response; later, reading raises it.
        """
        answer: Any = self._answers.remote(ticket, call)
        is_ended = False

        async def told() -> AsyncGenerator[Any, None]:
            nonlocal is_ended
            try:
                async for piece in answer:
                    yield piece
            except BackPressureError:
                raise
            except (RayError, RayServeException) as error:
                _log.warning("replica %s has not answered: %s", ticket.replica, type(error).__name__)
                raise BrokenError(str(error)) from error
            is_ended = True

        async with aclosing(told()) as pieces:
            try:
                head: Head = await anext(pieces)
                yield HandleAnswer(head.status, head.headers, pieces)
            except StopAsyncIteration:
                raise BrokenError("the replica ended its response before the head") from None
            finally:
                if not is_ended:
                    answer.cancel()


class EngineResponse(RelayedResponse):
    """The response of an engine to a call.

    Args:
        engines: to call.
        counts: of calls.
        routed: data of the call for routing.
        call: as it is passed on.
    """

    def __init__(self, engines: Engines, counts: FrontCounts, routed: RoutedCall, call: EngineCall) -> None:
        super().__init__(counts)
        self._engines, self._routed, self._call = engines, routed, call

    async def _answer(self, caller: Caller) -> None:
        tried: list[str] = []
        num_breaks = 0
        while True:
            ticket = Ticket(self._routed, tuple(tried))
            try:
                refusal = await self._attempt(ticket, caller)
            except BackPressureError:
                error = too_busy("the queue before the replicas is full", _RETRY_S)
                refusal = error_response(error)
                break
            except BrokenError:
                num_breaks += 1
                self._counts.num_broken += 1
                error = lost(ticket.replica or "that was chosen")
                if caller.has_begun:
                    await caller.end_with(error)
                    return
                refusal = error_response(error)
            finally:
                ticket.end()
            if refusal is None:
                return
            if ticket.replica is not None:
                tried.append(ticket.replica)
            if num_breaks == MOST_BREAKS or not _has_another(ticket.router, tried):
                break
            self._counts.num_retries += 1
        await caller.refuse(refusal)

    async def _attempt(self, ticket: Ticket, caller: Caller) -> Response | None:
        """Respond by a replica; returns the rejection of one that is full."""
        async with self._engines.call(ticket, self._call) as answer:
            if answer.status in TURNED_AWAY:
                refusal = Response(await answer.body(), answer.status, passed_back(answer))
                if not has_run(refusal):
                    return refusal
                await caller.refuse(refusal)
                return None
            self._counts.num_failed += await caller.pass_on(answer, ticket)
        return None


def _has_another(router: SharedRouter | None, tried: list[str]) -> bool:
    return router is not None and not set(router.replicas).issubset(tried)


def nobody_ready() -> Response:
    """The error of an ingress without replicas."""
    return error_response(unavailable("no replica is ready", 5))


_STATE_S = 2.0
_OF_ONE_HOP = frozenset(
    (
        *("host", "connection", "content-length", "transfer-encoding", "keep-alive"),
        *("upgrade", "te", "trailer", "expect"),
    )
)


class Ingress:
    """A deployment of Ray Serve in front of that of engines.

    It reads the body of a call, which Ray's proxies do not, so the router of its handle has the prompt.

    Args:
        handle: of the engines.
        settings: of this deployment.
    """

    # Ray awaits it, and so it has an event loop.
    async def __init__(self, handle: DeploymentHandle, settings: IngressSettings) -> None:  # type: ignore[misc]
        self._engines, self._settings = Engines(handle), settings
        self._own = handle.app_name, handle.deployment_name
        self._numbers = count()
        self._counts = FrontCounts()
        app = FastAPI(title="HPU-Duo", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
        install_error_handlers(app)
        app.include_router(self._routes())
        add_guards(app, settings.guarded, self._counts.responded)
        self._app = app
        self._context = contextvars.copy_context()
        # A handle has a router from its first call on, and that one waits until there is a replica.
        self._first_call = asyncio.create_task(self._asked("/version"))

    async def __call__(self, request: Request) -> Response:
        """Serve a call."""
        return _ByApp(self._app)

    def _routes(self) -> APIRouter:
        routes = APIRouter()
        routes.add_api_route("/live", self.live, methods=["GET", "HEAD"])
        for path in ("/health", "/ready"):
            routes.add_api_route(path, self.ready, methods=["GET", "HEAD"])
        routes.add_api_route("/stats", self.stats, methods=["GET"])
        routes.add_api_route("/metrics", self.metrics, methods=["GET"])
        routes.add_api_route("/{path:path}", self.passed_on, methods=["GET", "HEAD", "POST"])
        return routes

    # Routes

    async def live(self) -> Response:
        """Whether this process works; replicas are Ray's to look after."""
        return Response()

    async def ready(self) -> Response:
        """Whether any replica accepts calls."""
        router = self._router
        return Response() if router is not None and router.replicas else nobody_ready()

    async def stats(self) -> dict[str, Any]:
        """The fields of the first replica, those that add up for all, and each replica's own."""
        router = self._router
        answers = await self._asked_all("/stats")
        own = {name: json.loads(body) for name, body in answers.items()}
        fields: dict[str, Any] = dict(next(iter(own.values()), {}))
        for name in ("num_open", "max_open"):
            fields[name] = sum(each.get(name, 0) for each in own.values())
        names = () if router is None else router.replicas
        return {
            **fields,
            "stage": "ready" if names else "warming up",
            "router": self._settings.router,
            "num_ready": len(names),
            "replicas": [{"name": name, "stats": own.get(name)} for name in names],
        }

    async def metrics(self) -> Response:
        """Metrics for Prometheus, of this process and of all replicas."""
        texts = {name: body.decode() for name, body in (await self._asked_all("/metrics")).items()}
        router = self._router
        routed = [] if router is None else router.view()
        counts = self._counts if router is None else self._counts.joined(router.counts)
        return Response(text_of(texts, counts, routed), media_type=CONTENT_TYPE_LATEST)

    async def passed_on(self, request: Request) -> Response:
        """Forward everything else to a replica."""
        body = await request.body()
        namespace = request.scope.get(PREFIX_NAMESPACE)
        asked = body if request.method == "POST" else b""
        routed = await read_beside(str(next(self._numbers)), asked, namespace)
        headers = {name: value for name, value in request.headers.items() if name not in _OF_ONE_HOP}
        path = request.scope["raw_path"].decode("latin-1")
        call = EngineCall(request.method, path, request.url.query, headers, body, namespace)
        return EngineResponse(self._engines, self._counts, routed, call)

    # Replicas

    @property
    def _router(self) -> SharedRouter | None:
        return announced(*self._own)

    def _read(self) -> RoutedCall:
        return read_call(str(next(self._numbers)), b"")

    async def _asked(self, path: str, only: str | None = None) -> bytes | None:
        """The body of a response, of one replica or of any; None on a timeout or an error."""
        ticket = Ticket(self._read(), only=only)
        try:
            async with self._engines.call(ticket, EngineCall("GET", path)) as answer:
                return await answer.body() if answer.status == 200 else None
        except (BrokenError, BackPressureError):
            return None
        finally:
            ticket.end()

    async def _asked_all(self, path: str) -> Mapping[str, bytes]:
        """Responses of all replicas that respond in time."""
        router = self._router
        names = () if router is None else router.replicas
        # Ray confuses concurrent calls from within one call, so these have no parent call.
        asked = [self._context.run(asyncio.create_task, self._asked(path, name)) for name in names]
        answers = await asyncio.gather(
            *(asyncio.wait_for(each, _STATE_S) for each in asked), return_exceptions=True
        )
        return {name: each for name, each in zip(names, answers) if isinstance(each, bytes)}


class _ByApp(Response):
    """The response of an ASGI application to the current call, an object that Ray sends unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(below_prefix(scope), receive, send)
