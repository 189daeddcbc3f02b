"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from hpu_duo.server.protocol.errors import unauthorized
from hpu_duo.server.responding import error_response

OPEN_PATHS = frozenset({"/", "/live", "/health", "/ready", "/metrics", "/version", "/stats"})
"""Paths that need no key: nothing of any request can be read there."""


class ApiKeys:
    """Known keys.

    Args:
        keys: none lets everybody in.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have one length, so that comparing them takes the same time for every key.
        self._digests = tuple(_digest(key) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admits(self, authorization: str | None) -> bool:
        """Whether a header names a known key; every known key is compared, whichever it is."""
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class KeyMiddleware:
    """Answers 401 to calls without a known key.

    Args:
        app: behind it.
        keys: at least one.
        open_prefixes: paths below these need no key, besides ``OPEN_PATHS``.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_prefixes: tuple[str, ...] = ()) -> None:
        self._app, self._keys, self._open_prefixes = app, keys, open_prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] == "http" and not self._is_open(scope):
            authorization = Headers(scope=scope).get("authorization")
            if not self._keys.admits(authorization):
                await error_response(unauthorized())(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path: str = scope["path"]
        # Browsers ask for permission without a key (CORS).
        is_question = scope["method"] == "OPTIONS"
        return is_question or path in OPEN_PATHS or path.startswith(self._open_prefixes or ("\0",))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
