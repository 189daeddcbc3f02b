"""``/health``, ``/ready``, ``/metrics``, ``/stats`` and ``/version``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from hpu_duo import __version__
from hpu_duo.server.http.schemas import BUSY
from hpu_duo.server.http.statistics import statistics
from hpu_duo.server.responding import as_api_error, error_response
from hpu_duo.server.running.admission import NotServingError, Stage
from hpu_duo.server.service import Service


def state_routes(service: Service) -> APIRouter:
    """Routes that tell how the server is."""
    router = APIRouter(tags=["state"])
    registry = CollectorRegistry(auto_describe=False)
    registry.register(service.metrics)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)

    @router.get("/health", response_class=Response, responses={503: BUSY[503]})
    async def health() -> Response:
        """Whether the process can still serve: 503 asks a supervisor to start it anew."""
        if service.stage is Stage.FAILED:
            return error_response(as_api_error(NotServingError(Stage.FAILED)))
        return Response()

    @router.get("/ready", response_class=Response, responses={503: BUSY[503]})
    async def ready() -> Response:
        """Whether requests are taken: all is loaded and captured, and the server is not about to stop."""
        if service.stage is not Stage.READY:
            return error_response(as_api_error(NotServingError(service.stage)))
        return Response()

    for path, endpoint in (("/health", health), ("/ready", ready)):
        router.head(path, include_in_schema=False)(endpoint)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of HPU-Duo."""
        return {"version": __version__}

    @router.get("/stats")
    async def stats() -> dict[str, Any]:
        """Statistics of the engine, as of a moment ago, and of the server around it; see docs/server.md."""
        return statistics(service)

    @router.get("/metrics", response_class=Response)
    def metrics() -> Response:
        """Metrics for Prometheus; see docs/server.md."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router
