"""Errors as responses."""

from __future__ import annotations

import logging

from starlette.responses import JSONResponse, Response

from hpu_duo.sampling import FieldError
from hpu_duo.server.protocol import ApiError
from hpu_duo.server.protocol.errors import bad_value, failed, too_busy, unavailable
from hpu_duo.server.running import (
    AnswerMemoryFullError,
    AnswerTooLargeError,
    EngineDiedError,
    RequestFailedError,
    SlowReaderError,
)
from hpu_duo.server.running.admission import NotServingError, QueueFullError, Stage

_log = logging.getLogger(__name__)

_STARTING_S, _STOPPING_S, _FULL_S = 5, 1, 1


def error_response(error: ApiError) -> Response:
    """An error as a response."""
    return JSONResponse(error.body, error.status, headers=error.headers)


def as_api_error(error: Exception) -> ApiError:
    """Turn any error into one for the caller; unexpected ones are logged, and told as such."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return too_busy(str(error), error.retry_after_s)
        case NotServingError(stage=stage):
            wait = {Stage.WARMING_UP: _STARTING_S, Stage.DRAINING: _STOPPING_S}.get(stage)
            return unavailable(str(error), wait)
        case EngineDiedError():
            return unavailable(str(error))
        case RequestFailedError(__cause__=FieldError() as cause):
            return bad_value(cause.field, str(cause))
        case AnswerTooLargeError():
            return ApiError(400, str(error), code="answer_too_large")
        case AnswerMemoryFullError():
            return unavailable(str(error), _FULL_S, code="answer_memory_full")
        case RequestFailedError() | SlowReaderError():
            return failed(str(error))
        case _:
            _log.error("a call has failed", exc_info=error)
            return failed(f"{type(error).__name__} in the server; its log says more")
