"""``/metrics``, ``/stats`` and ``/version``, and the probes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from hpu_duo import __version__
from hpu_duo.server.http.probes import probe_routes
from hpu_duo.server.http.statistics import statistics
from hpu_duo.server.service import Service


def state_routes(service: Service) -> APIRouter:
    """Routes that tell how the server is."""
    router = APIRouter(tags=["state"])
    registry = CollectorRegistry(auto_describe=False)
    registry.register(service.metrics)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)

    router.include_router(probe_routes(lambda: service.stage))

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of HPU-Duo."""
        return {"version": __version__}

    @router.get("/stats")
    async def stats() -> dict[str, Any]:
        """Statistics of the engine, as of a moment ago, and of the server around it; see docs/server.md."""
        return statistics(service)

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus; see docs/server.md."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router
