"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Response

from hpu_duo.server.answers.events import as_json
from hpu_duo.server.http.json_route import JsonRoute
from hpu_duo.server.http.schemas import REFUSALS
from hpu_duo.server.planning.sampling import checked_text
from hpu_duo.server.protocol import DetokenizeRequest, TokenizeRequest
from hpu_duo.server.protocol.errors import bad_value
from hpu_duo.server.service import Service

_SHORT = 4096
"""Tokens of an answer that is written at once."""


def token_routes(service: Service) -> APIRouter:
    """Routes that turn text into token ids and back."""
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
        return await _answer(found, len(tokens))

    @router.post("/detokenize", responses=REFUSALS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included."""
        served.name_for(body.model)
        text = await served.needs_encoder("tokens").decode(body.tokens)
        return await _answer({"prompt": text}, len(body.tokens))

    return router


async def _answer(found: dict[str, Any], num_tokens: int) -> Response:
    """JSON, written beside the event loop if it is long."""
    data = as_json(found) if num_tokens <= _SHORT else await asyncio.to_thread(as_json, found)
    return Response(data, media_type="application/json")
