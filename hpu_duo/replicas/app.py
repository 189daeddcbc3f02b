"""The application of the front process: state of all replicas, and everything else passed on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from hpu_duo import __version__
from hpu_duo.replicas.front import Front
from hpu_duo.replicas.metrics import exposition
from hpu_duo.replicas.replica import ReplicaState
from hpu_duo.server.http.errors import install_error_handlers
from hpu_duo.server.http.guards import add_guards
from hpu_duo.server.http.probes import probe_routes

_STATS_S = 2.0


def create_front_app(front: Front) -> FastAPI:
    """An ASGI application that serves with a front, which starts and stops with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await front.start()
        yield
        await front.stop()

    app = FastAPI(
        title="HPU-Duo",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    install_error_handlers(app)
    app.include_router(_routes(front))
    add_guards(app, front.config.server, front.counts.responded)
    return app


def _routes(front: Front) -> APIRouter:
    router = APIRouter()

    async def stats() -> dict[str, Any]:
        """The statistics of each replica, and of the router."""
        return await statistics(front)

    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(await exposition(front), media_type=CONTENT_TYPE_LATEST)

    async def passed_on(request: Request) -> Response:
        """Everything else."""
        return await front.answer(request)

    router.include_router(probe_routes(lambda: front.stage))
    router.add_api_route("/stats", stats, methods=["GET"])
    router.add_api_route("/metrics", metrics, methods=["GET"])
    router.add_api_route("/{path:path}", passed_on, methods=["GET", "HEAD", "POST"])
    return router


async def statistics(front: Front) -> dict[str, Any]:
    """The fields of the first ready replica, those that add up for all, and each replica's own."""
    ready = [name for name, each in front.replicas.items() if each.state is ReplicaState.READY]
    answers = await asyncio.gather(*(front.upstream.text(f"{front.url(n)}/stats", _STATS_S) for n in ready))
    own = {name: json.loads(found[1]) for name, found in zip(ready, answers) if found and found[0] == 200}
    fields: dict[str, Any] = dict(next(iter(own.values()), {}))
    for name in ("num_open", "max_open"):
        fields[name] = sum(each.get(name, 0) for each in own.values())
    return {
        **fields,
        "stage": front.stage.value,
        "router": front.router.name,
        "num_ready": front.num_ready,
        "replicas": [
            {
                "name": name,
                "state": each.state.value,
                "pid": each.pid,
                "num_restarts": each.num_restarts,
                "stats": own.get(name),
            }
            for name, each in front.replicas.items()
        ],
    }
