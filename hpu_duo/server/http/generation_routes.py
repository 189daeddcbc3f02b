"""``/v1/completions``, ``/v1/chat/completions`` and ``/v1/models``."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from openai.types import Completion
from openai.types.chat import ChatCompletion

from hpu_duo.server.http.auth import PREFIX_NAMESPACE
from hpu_duo.server.http.json_route import JsonRoute
from hpu_duo.server.http.request_ids import REQUEST_ID
from hpu_duo.server.http.schemas import BUSY, REFUSALS
from hpu_duo.server.protocol import ChatRequest, CompletionRequest
from hpu_duo.server.protocol.errors import unknown_model
from hpu_duo.server.protocol.generation import GenerationRequest
from hpu_duo.server.service import Service

_Body = TypeVar("_Body", bound=GenerationRequest)


def _named(body: _Body, request: Request) -> _Body:
    """A call with its names: of its header, of who asks, and of its key, which its salt holds.

    So calls of different keys share no cached prefix.
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
    """Routes that generate, and the list of what they generate with."""
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
