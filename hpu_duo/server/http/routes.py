"""The application, and its routes: generation, tokens, state, probes and the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from openai.types import Completion
from openai.types.chat import ChatCompletion
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from pydantic import BaseModel

from hpu_duo import __version__
from hpu_duo.server.answers.answer import as_json
from hpu_duo.server.http.auth import PREFIX_NAMESPACE
from hpu_duo.server.http.middleware import (
    REQUEST_ID,
    JsonRoute,
    add_guards,
    install_error_handlers,
    page_routes,
)
from hpu_duo.server.planning.plan import checked_text
from hpu_duo.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    bad_value,
    unknown_model,
)
from hpu_duo.server.responding import as_api_error, error_response
from hpu_duo.server.running.admission import NotServingError, Stage
from hpu_duo.server.service import Service


def statistics(service: Service) -> dict[str, Any]:
    """Return the engine's statistics, its resolved settings and limits, and the state of the server.

    It has no data of single calls, because the route may need no API key.
    """
    found = asdict(service.engine.stats)
    limits = found["resolved"].pop("limits")
    resolved = {**found.pop("resolved"), **limits}
    return {**found, "resolved": resolved, **_of_server(service), "kv": _kv_sizes(service)}


def _of_server(service: Service) -> dict[str, Any]:
    served, progress = service.served, service.warm_up_progress
    return {
        "model": served.names[0],
        "version": __version__,
        "stage": service.stage.value,
        "warm_up": None if progress is None else {"captured": progress[0], "total": progress[1]},
        "num_open": service.engine.num_open,
        "max_open": service.admission.max_open,
        "answer_bytes": service.engine.memory.num_bytes,
        "max_answer_memory_bytes": service.engine.memory.max_bytes,
        "num_recompilations": service.num_recompiles,
        "has_chat_template": served.encoder is not None and served.encoder.template.source is not None,
        "asks_for_key": bool(service.config.api_keys),
    }


def _kv_sizes(service: Service) -> dict[str, int]:
    """Sizes from which the KV memory of a request follows, and that with full attention."""
    memory = service.memory
    row_bytes = memory.bytes_per_request(0)
    return {
        "block_size": memory.block_size,
        "block_bytes": memory.bytes_per_request(1) - row_bytes,
        "row_bytes": row_bytes,
        "full_attention_token_bytes": memory.full_attention_bytes(1),
    }


class ErrorFields(BaseModel):
    """An error, as the OpenAI API has it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response whose status is 400 or more."""

    error: ErrorFields


def _error(description: str) -> dict[str, Any]:
    return {"model": ErrorBody, "description": description}


REFUSALS: dict[int | str, dict[str, Any]] = {
    400: _error("A field has a value that it cannot have; `param` names it."),
    401: _error("No API key, or an unknown one."),
    404: _error("The model is not served."),
    413: _error("The body is too long."),
}

BUSY: dict[int | str, dict[str, Any]] = {
    429: _error("The queue is full; `Retry-After` has the seconds until a retry."),
    500: _error("Something failed here."),
    503: _error("Not ready yet, or stopping."),
}

_Body = TypeVar("_Body", bound=GenerationRequest)


def _named(body: _Body, request: Request) -> _Body:
    """A call with its ids: its request id, its user, and the namespace of its key, which is part of the salt.

    So calls with different keys share no cached prefix.
    """
    own = {
        "request_id": body.request_id or request.headers[REQUEST_ID],
        "user": body.user or body.safety_identifier,
    }
    body = body.model_copy(update=own)
    namespace: str | None = request.scope.get(PREFIX_NAMESPACE)
    if namespace is None:
        return body
    return body.model_copy(update={"cache_salt": f"{namespace}:{body.cache_salt or ''}"})


def _answer(model: type, events: str) -> dict[int | str, dict[str, Any]]:
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"model": model, "content": content, "description": events}, **REFUSALS, **BUSY}


def generation_routes(service: Service) -> APIRouter:
    """Return the routes that generate, and those of the model list."""
    router = APIRouter(prefix="/v1", tags=["generation"], route_class=JsonRoute)

    @router.post(
        "/completions",
        response_class=Response,
        responses=_answer(Completion, "The whole answer, or with `stream` its events."),
    )
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        return await service.answer(request, lambda: service.completions.plan(_named(body, request)))

    @router.post(
        "/chat/completions",
        response_class=Response,
        responses=_answer(ChatCompletion, "The whole answer, or with `stream` its events."),
    )
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Continue a conversation."""
        return await service.answer(request, lambda: service.chats.plan(_named(body, request)))

    @router.get("/models", responses={401: REFUSALS[401]})
    async def list_models() -> dict[str, Any]:
        """The model, under each of its names."""
        return {"object": "list", "data": service.served.cards()}

    @router.get("/models/{name:path}", responses={401: REFUSALS[401], 404: REFUSALS[404]})
    async def retrieve_model(name: str) -> dict[str, Any]:
        """The model, under one of its names."""
        for card in service.served.cards():
            if card["id"] == name:
                return card
        raise unknown_model(name, service.served.names)

    return router


_SHORT = 4096
"""Most tokens of a response that is encoded in the event loop."""


def token_routes(service: Service) -> APIRouter:
    """Return the routes that convert text to token ids and back."""
    router = APIRouter(tags=["tokens"], route_class=JsonRoute)
    served = service.served

    @router.post("/tokenize", responses=REFUSALS)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text, or of a conversation."""
        served.name_for(body.model)
        if (body.prompt is None) is (body.messages is None):
            raise bad_value("prompt", "prompt: expected prompt or messages, one of them")
        encoder = served.needs_encoder("prompt")
        if body.prompt is None:
            tokens = await service.chats.encode(body, has_tools=True)
        else:
            with checked_text("prompt", served):
                tokens = await encoder.encode(
                    body.prompt, add_special_tokens=body.add_special_tokens is not False
                )
        found: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": served.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            found["token_strs"] = await encoder.names(tokens)
        return await _token_answer(found, len(tokens))

    @router.post("/detokenize", responses=REFUSALS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included."""
        served.name_for(body.model)
        text = await served.needs_encoder("tokens").decode(body.tokens)
        return await _token_answer({"prompt": text}, len(body.tokens))

    return router


async def _token_answer(found: dict[str, Any], num_tokens: int) -> Response:
    """A JSON response, encoded in a thread if it is long."""
    data = as_json(found) if num_tokens <= _SHORT else await asyncio.to_thread(as_json, found)
    return Response(data, media_type="application/json")


def probe_routes(stage: Callable[[], Stage]) -> APIRouter:
    """Return the health checks, which respond with 200 or 503.

    Args:
        stage: returns the stage of the server's lifecycle.
    """
    router = APIRouter(tags=["state"])

    def answer(*stages: Stage) -> Response:
        now = stage()
        return Response() if now in stages else error_response(as_api_error(NotServingError(now)))

    async def live() -> Response:
        """Liveness, warm-up included: on 503 a supervisor should restart the process."""
        return answer(Stage.WARMING_UP, Stage.READY, Stage.DRAINING)

    async def health() -> Response:
        """Whether the server can serve: 503 until it accepts calls, 200 while it drains."""
        return answer(Stage.READY, Stage.DRAINING)

    async def ready() -> Response:
        """Readiness: all is loaded and captured, and the server is not stopping."""
        return answer(Stage.READY)

    for path, endpoint in (("/live", live), ("/health", health), ("/ready", ready)):
        router.get(path, response_class=Response, responses={503: BUSY[503]})(endpoint)
        router.head(path, include_in_schema=False)(endpoint)
    return router


def state_routes(service: Service) -> APIRouter:
    """Return the routes of version, statistics and metrics."""
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
        """Recent statistics of the engine and of the server; see docs/server.md."""
        return statistics(service)

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus; see docs/server.md."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router


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
