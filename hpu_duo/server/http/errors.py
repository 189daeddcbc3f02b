"""Errors that the framework meets, in the words of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from hpu_duo.server.protocol import ApiError
from hpu_duo.server.protocol.errors import bad_value
from hpu_duo.server.responding import as_api_error, error_response
from hpu_duo.server.running import EngineDiedError, RequestFailedError
from hpu_duo.server.running.admission import NotServingError, QueueFullError

_UNKNOWN = {
    404: "expected a path of this server, see /openapi.json",
    405: "expected a method that the path has, see /openapi.json",
}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_long"}


def install_error_handlers(app: FastAPI) -> None:
    """Let every error have the body of the OpenAI API."""

    async def known(_: Request, error: Exception) -> Response:
        return error_response(as_api_error(error))

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), "registered for it"
        return error_response(of_validation(error.errors()))

    async def by_status(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for it"
        return error_response(of_status(error, f"{request.method} {request.url.path}"))

    for kind in (ApiError, QueueFullError, NotServingError, EngineDiedError, RequestFailedError, Exception):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, by_status)


def of_status(error: HTTPException, call: str = "") -> ApiError:
    """An error that the framework has found.

    Args:
        call: method and path.
    """
    message = str(error.detail)
    if error.status_code in _UNKNOWN:
        message = f"{_UNKNOWN[error.status_code]}, got {call}"
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    code = _CODES.get(error.status_code)
    return ApiError(error.status_code, message, kind=kind, code=code, headers=error.headers)


def of_validation(errors: Sequence[Any]) -> ApiError:
    """Describe a body that is not as it should be by its first field at fault.

    Args:
        errors: of pydantic, for the same field one for each type that it may have.
    """
    first = tuple(errors[0]["loc"])
    if errors[0]["type"] == "json_invalid":
        return bad_value(
            None, f"expected JSON in the body: {errors[0].get('ctx', {}).get('error', 'it is none')}"
        )
    if len(first) < 2:
        return bad_value(None, "expected a JSON object in the body, with content-type: application/json")
    param = str(first[1])
    reasons = []
    for error in errors:
        if tuple(error["loc"])[1:2] == first[1:2] and error["msg"] not in reasons:
            reasons.append(error["msg"])
    place = "".join(f"[{part}]" if isinstance(part, int) else "" for part in first[2:])
    return bad_value(param, f"{param}{place}: {'; or '.join(reasons[:4])}")
