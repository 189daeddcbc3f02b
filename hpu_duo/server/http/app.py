"""The ASGI application: routes and middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from hpu_duo import __version__
from hpu_duo.server.http.middleware import add_guards, install_error_handlers
from hpu_duo.server.http.page_routes import page_routes
from hpu_duo.server.http.routes import generation_routes, state_routes, token_routes
from hpu_duo.server.service import Service


def create_app(service: Service, *, warm_up: bool = False) -> FastAPI:
    """Create the ASGI application of a service, which starts and stops with it.

    Args:
        warm_up: see ``Service.start``.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start(warm_up)
        yield
        await service.stop()

    app = FastAPI(
        title="HPU-Duo",
        version=__version__,
        description="The OpenAI API around one model.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    install_error_handlers(app)
    for router in (generation_routes(service), token_routes(service), state_routes(service)):
        app.include_router(router)
    config = service.config
    if config.has_page:
        app.include_router(page_routes())
    add_guards(app, config, service.metrics.responded)
    return app
