"""Middleware: limits, request ids, errors, JSON bodies."""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Callable, Coroutine, Sequence
from importlib.resources import files
from typing import Any, get_type_hints

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hpu_duo.server.config import ServerConfig
from hpu_duo.server.http.auth import ApiKeys, KeyMiddleware, StatePathMiddleware
from hpu_duo.server.protocol import MAX_VALUES, ApiError, Fields, ValueCount, bad_value
from hpu_duo.server.responding import WRITE, Write, as_api_error, error_response
from hpu_duo.server.running import EngineDiedError, RequestFailedError
from hpu_duo.server.running.admission import NotServingError, QueueFullError
from hpu_duo.server.telemetry.metrics import Count, CountingMiddleware

PAGE_PREFIX = "/page/"
"""Paths of the page's static files, which need no key."""

_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # Scripts cannot convert text to markup (Trusted Types).
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}

_HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    # A browser must not cache the page of an older version.
    "Cache-Control": "no-cache",
}


class _File:
    """A file of the page, with its media type and ETag."""

    def __init__(self, data: bytes, media_type: str) -> None:
        self._data, self._media_type = data, media_type
        self._headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(data).hexdigest()[:32]}"'}

    def response(self, request: Request) -> Response:
        """Respond with the file, or 304 if it is unchanged."""
        known = request.headers.get("if-none-match", "")
        if self._headers["ETag"] in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=self._headers)
        return Response(self._data, headers=self._headers, media_type=self._media_type)


def page_routes() -> APIRouter:
    """Return the routes of the page and of its files, which are read once."""
    router = APIRouter(include_in_schema=False)
    found = {}
    for file in (files("hpu_duo.server") / "page").iterdir():
        if media_type := _MEDIA_TYPES.get(file.name.rpartition(".")[2]):
            found[file.name] = _File(file.read_bytes(), media_type)
    index = found.pop("index.html")

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        """The page."""
        return index.response(request)

    @router.api_route(PAGE_PREFIX + "{name}", methods=["GET", "HEAD"])
    async def page_file(name: str, request: Request) -> Response:
        """A file that the page needs."""
        if name not in found:
            raise HTTPException(404, f"expected a file of the page, got {name!r}")
        return found[name].response(request)

    return router


class DirectWrites:
    """Adds an ASGI extension that writes a piece of a body without waiting, if the connection is writable.

    It relies on uvicorn's ``send``: it waits while a connection is paused, before it has written anything,
    and then writes without waiting. So a ``send`` that waits is cancelled, and nothing was written.

    Args:
        app: the next application, served by uvicorn.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] == "http":
            scope.setdefault("extensions", {})[WRITE] = _writer(send)
        await self._app(scope, receive, send)


def _writer(send: Send) -> Write:
    def write(data: bytes) -> bool:
        sending = send({"type": "http.response.body", "body": data, "more_body": True}).__await__()
        try:
            next(sending)
        except StopIteration:
            return True
        sending.close()
        return False

    return write


REQUEST_ID = "x-request-id"
_MOST = 256


class RequestIdMiddleware:
    """Sets the request id header of each call, if missing or invalid, and returns it.

    Args:
        app: the next application; a request id of its response takes precedence.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        name = given if _is_proper(given) else uuid.uuid4().hex
        others = [pair for pair in scope["headers"] if pair[0] != REQUEST_ID.encode()]
        scope["headers"] = [*others, (REQUEST_ID.encode(), name.encode())]

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault(REQUEST_ID, name)
            await send(message)

        await self._app(scope, receive, named)


def _is_proper(name: str) -> bool:
    return 0 < len(name) <= _MOST and name.isascii() and name.isprintable()


_UNKNOWN = {
    404: "expected a path of this server, see /openapi.json",
    405: "expected a method that the path has, see /openapi.json",
}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_long"}


def install_error_handlers(app: FastAPI) -> None:
    """Install handlers that give every error the body of the OpenAI API."""

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
    """Convert an error of the framework.

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
    """Describe an invalid body by its first invalid field.

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


class BodyLimitMiddleware:
    """Rejects bodies with too many bytes or JSON values (413), as soon as that is known.

    A body of a few MiB may contain more values than fit into memory, so they are counted before parsing.

    Args:
        app: the next application.
        max_bytes: most bytes of a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            await error_response(of_status(self._too_long()))(scope, receive, send)
            return
        num_bytes, values = 0, ValueCount()

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            body = message.get("body", b"")
            num_bytes += len(body)
            if num_bytes > self._max_bytes:
                raise self._too_long()
            if values.add(body) > MAX_VALUES:
                raise _refusal(f"expected a body of at most {MAX_VALUES:,} JSON values")
            return message

        await self._app(scope, counted, send)

    def _too_long(self) -> HTTPException:
        return _refusal(f"expected a body of at most {self._max_bytes:,} bytes")


def _refusal(message: str) -> HTTPException:
    # The rest of the body is not read, so the connection cannot be reused.
    return HTTPException(413, message, {"Connection": "close"})


def add_guards(app: FastAPI, config: ServerConfig, count: Count) -> None:
    """Add the middleware of all calls: request id, counters, CORS, keys and the limit of bodies.

    Args:
        count: see ``CountingMiddleware``.
    """
    # The last one added is the outermost.
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


_SHORT = 16 * 2**10
"""Bodies of up to this number of bytes are parsed in the event loop: a thread would cost more."""


class _StrictRequest(Request):
    """A parser stricter than Python's: no NaN, no lone surrogates, bounded depth.

    Attributes:
        model: type of the body; None for routes without one.
        refusal: the error of its fields; None if there is none.
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
            # FastAPI converts it to an error response.
            raise json.JSONDecodeError(str(error), "", 0) from error

    def _read(self, body: bytes) -> Any:
        values = from_json(body, allow_inf_nan=False)
        if self.model is None or not isinstance(values, dict):
            return values
        # FastAPI does not validate it again.
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
