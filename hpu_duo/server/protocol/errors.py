"""Errors as the OpenAI API writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST_CHARACTERS = 2000
"""Of a message, which may have what came in it."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of the HTTP response.
        message: what was expected, and what came.
        param: field of the request that is at fault.
        kind: the error's ``type``.
        code: a word for programs.
        headers: of the HTTP response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str = "invalid_request_error",
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > _MOST_CHARACTERS:
            message = f"{message[:_MOST_CHARACTERS]}..."
        super().__init__(message)
        self.status, self.message, self.param, self.kind, self.code = status, message, param, kind, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad_value(param: str | None, message: str) -> ApiError:
    """A field has a value that it cannot have."""
    return ApiError(400, message, param=param, code="invalid_value")


def too_long(param: str, message: str) -> ApiError:
    """Prompt and output together are longer than the model takes."""
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unsupported(param: str, message: str) -> ApiError:
    """A field asks for what this server does not do."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def unauthorized() -> ApiError:
    """No key, or one that is not known."""
    return ApiError(
        401,
        "expected an API key that this server knows in the header Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def unknown_model(asked: str, served: tuple[str, ...]) -> ApiError:
    """The call is for a model that is not served."""
    message = f"expected one of the models {', '.join(served)}, got {asked!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def too_busy(message: str, retry_after_s: int) -> ApiError:
    """The queue is full."""
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(retry_after_s)},
    )


def unavailable(message: str, retry_after_s: int | None = None, *, code: str = "unavailable") -> ApiError:
    """Nothing is served now: not yet, no longer, or for want of memory."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, kind="service_unavailable_error", code=code, headers=headers)


def failed(message: str) -> ApiError:
    """Something went wrong here, and not with the call."""
    return ApiError(500, message, kind="server_error", code="internal_error")
