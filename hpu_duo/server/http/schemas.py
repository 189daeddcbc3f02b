"""Responses as OpenAPI describes them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


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
    429: _error("The queue is full; `Retry-After` says when to come again."),
    500: _error("Something failed here."),
    503: _error("Not ready yet, or about to stop."),
}
