"""``/live``, ``/health`` and ``/ready``: what supervisors, waiting scripts and load balancers ask."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Response

from hpu_duo.server.http.schemas import BUSY
from hpu_duo.server.responding import as_api_error, error_response
from hpu_duo.server.running.admission import NotServingError, Stage


def probe_routes(stage: Callable[[], Stage]) -> APIRouter:
    """Routes that answer 200 or 503.

    Args:
        stage: tells the stage of the server's life.
    """
    router = APIRouter(tags=["state"])

    def answer(*stages: Stage) -> Response:
        now = stage()
        return Response() if now in stages else error_response(as_api_error(NotServingError(now)))

    async def live() -> Response:
        """Whether the process works, if only on its warm-up: 503 asks a supervisor to start it anew."""
        return answer(Stage.WARMING_UP, Stage.READY, Stage.DRAINING)

    async def health() -> Response:
        """Whether the server can serve: 503 until its first call would be taken, 200 while it drains."""
        return answer(Stage.READY, Stage.DRAINING)

    async def ready() -> Response:
        """Whether requests are taken: all is loaded and captured, and the server is not about to stop."""
        return answer(Stage.READY)

    for path, endpoint in (("/live", live), ("/health", health), ("/ready", ready)):
        router.get(path, response_class=Response, responses={503: BUSY[503]})(endpoint)
        router.head(path, include_in_schema=False)(endpoint)
    return router
