"""The deployment that callers reach: reads calls, and passes them on to engines."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Mapping
from itertools import count
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from hpu_duo import __version__
from hpu_duo.ray_serve.arguments import IngressSettings
from hpu_duo.ray_serve.exchange import EngineCall, below_prefix
from hpu_duo.ray_serve.relaying import EngineResponse, Engines, nobody_ready
from hpu_duo.ray_serve.shared_router import SharedRouter, Ticket, announced
from hpu_duo.replicas.answer import BrokenError
from hpu_duo.replicas.counts import FrontCounts
from hpu_duo.replicas.metrics import text_of
from hpu_duo.replicas.prompts import RoutedCall, read_beside, read_call
from hpu_duo.server.http.auth import PREFIX_NAMESPACE
from hpu_duo.server.http.errors import install_error_handlers
from hpu_duo.server.http.guards import add_guards

_STATE_S = 2.0
_OF_ONE_HOP = frozenset(
    (
        *("host", "connection", "content-length", "transfer-encoding", "keep-alive"),
        *("upgrade", "te", "trailer", "expect"),
    )
)


class Ingress:
    """A deployment of Ray Serve in front of that of engines.

    It reads the body of a call, which Ray's proxies do not, and so its handle's router knows the prompt.

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
        """Answer a call."""
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
        """Whether any replica takes calls."""
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
        """Answer everything else by a replica."""
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
        """The body of an answer, of one replica or of any; None if it does not come or is an error."""
        ticket = Ticket(self._read(), only=only)
        try:
            async with self._engines.call(ticket, EngineCall("GET", path)) as answer:
                return await answer.body() if answer.status == 200 else None
        except (BrokenError, BackPressureError):
            return None
        finally:
            ticket.end()

    async def _asked_all(self, path: str) -> Mapping[str, bytes]:
        """Answers of all replicas that give one in time."""
        router = self._router
        names = () if router is None else router.replicas
        # Ray takes calls that one call makes at the same time for one another, so these come from none.
        asked = [self._context.run(asyncio.create_task, self._asked(path, name)) for name in names]
        answers = await asyncio.gather(
            *(asyncio.wait_for(each, _STATE_S) for each in asked), return_exceptions=True
        )
        return {name: each for name, each in zip(names, answers) if isinstance(each, bytes)}


class _ByApp(Response):
    """Response by an application, to the call at hand: an object that Ray sends as it is."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(below_prefix(scope), receive, send)
