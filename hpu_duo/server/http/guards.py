"""Guards of an application: what every call goes through before the routes."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from hpu_duo.server.config import ServerConfig
from hpu_duo.server.http.auth import ApiKeys, KeyMiddleware, StatePathMiddleware
from hpu_duo.server.http.body_limit import BodyLimitMiddleware
from hpu_duo.server.http.page_routes import PAGE_PREFIX
from hpu_duo.server.http.request_ids import REQUEST_ID, RequestIdMiddleware
from hpu_duo.server.telemetry.counting import Count, CountingMiddleware


def add_guards(app: FastAPI, config: ServerConfig, count: Count) -> None:
    """Add what every call goes through: its name, counting, origins, keys and the limit of its body.

    Args:
        count: see ``CountingMiddleware``.
    """
    # The last one added is the first to see a call.
    app.add_middleware(BodyLimitMiddleware, max_bytes=config.max_body_bytes)
    if config.api_keys or config.metrics_api_keys:
        app.add_middleware(
            KeyMiddleware,
            keys=ApiKeys(config.api_keys),
            metrics_keys=ApiKeys(config.metrics_api_keys),
            shares_prefixes=config.shares_prefixes,
            open_prefixes=(PAGE_PREFIX,),
        )
    app.add_middleware(StatePathMiddleware)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    app.add_middleware(CountingMiddleware, count=count)
    app.add_middleware(RequestIdMiddleware)
