"""Bodies read as JSON, and as nothing that only resembles it; long ones beside the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic_core import from_json

from hpu_duo.server.protocol.generation import Fields

_SHORT = 16 * 2**10
"""Bodies of up to so many bytes are read at once: a thread would take longer to be asked."""


class _StrictRequest(Request):
    """Refuses what Python's own parser takes: NaN, halves of surrogate pairs, and any depth.

    Attributes:
        model: type of the body; None for routes without one.
        refusal: what is wrong with its fields; None while nothing is.
    """

    model: type[Fields] | None = None
    refusal: RequestValidationError | None = None

    async def json(self) -> Any:
        body = await self.body()
        try:
            return self._read(body) if len(body) <= _SHORT else await asyncio.to_thread(self._read, body)
        except ValidationError as error:
            problems = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
            self.refusal = RequestValidationError(problems)
            raise json.JSONDecodeError("see refusal", "", 0) from error
        except ValueError as error:
            # What FastAPI turns into a refusal.
            raise json.JSONDecodeError(str(error), "", 0) from error

    def _read(self, body: bytes) -> Any:
        values = from_json(body, allow_inf_nan=False)
        if self.model is None or not isinstance(values, dict):
            return values
        # FastAPI takes what is checked already as it is.
        request = self.model.model_validate(values)
        request.set_size(len(body))
        return request


class JsonRoute(APIRoute):
    """A route whose bodies are JSON as RFC 8259 has it, in a parameter called ``body``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function that handles a request."""
        handle = super().get_route_handler()
        model = get_type_hints(self.endpoint).get("body")

        async def handle_strictly(request: Request) -> Response:
            strict = _StrictRequest(request.scope, request.receive)
            strict.model = model
            try:
                return await handle(strict)
            except RequestValidationError:
                if strict.refusal is not None:
                    raise strict.refusal from None
                raise

        return handle_strictly
