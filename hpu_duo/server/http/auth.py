"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from hpu_duo.server.protocol import unauthorized
from hpu_duo.server.responding import error_response

OPEN_PATHS = frozenset({"/", "/live", "/health", "/ready", "/metrics", "/version", "/stats"})
"""Paths that need no key: they have no data of requests."""

METRICS_PATHS = frozenset({"/metrics", "/stats"})
"""Paths with keys of their own."""

PREFIX_NAMESPACE = "hpu_duo.prefix_namespace"
"""Key of an ASGI scope: the namespace of cached prefixes."""

LET_IN = "hpu_duo.let_in"
"""Key of an ASGI extension: a function to call with the valid key of a connection."""


class ApiKeys:
    """Valid keys.

    Args:
        keys: empty = access without a key.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have one length, so that comparing them needs constant time.
        self._digests = tuple(_digest(key) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admitted(self, authorization: str | None) -> str | None:
        """Return a name of the valid key in a header; None if there is none. Every valid key is compared."""
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return given.hex() if scheme.lower() == "bearer" and any(matches) else None


class StatePathMiddleware:
    """Serves ``OPEN_PATHS`` with a trailing slash too.

    Args:
        app: the next application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] == "http" and scope["path"].endswith("/") and scope["path"][:-1] in OPEN_PATHS:
            scope["path"] = scope["path"][:-1]
            scope["raw_path"] = scope["path"].encode()
        await self._app(scope, receive, send)


class KeyMiddleware:
    """Rejects calls without a valid key (401).

    Args:
        app: the next application.
        keys: of calls; empty = no key is needed.
        metrics_keys: of ``METRICS_PATHS``; empty = no key is needed.
        shares_prefixes: set no ``PREFIX_NAMESPACE``; else each key has one of its own.
        open_prefixes: paths below these need no key either.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        *,
        metrics_keys: ApiKeys,
        shares_prefixes: bool = False,
        open_prefixes: tuple[str, ...] = (),
    ) -> None:
        self._app, self._keys, self._metrics_keys = app, keys, metrics_keys
        self._shares_prefixes, self._open_prefixes = shares_prefixes, open_prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] == "http" and (keys := self._asked(scope)):
            name = keys.admitted(Headers(scope=scope).get("authorization"))
            if name is None:
                await error_response(unauthorized())(scope, receive, send)
                return
            if not self._shares_prefixes:
                scope[PREFIX_NAMESPACE] = name
            if let_in := (scope.get("extensions") or {}).get(LET_IN):
                let_in()
        await self._app(scope, receive, send)

    def _asked(self, scope: Scope) -> ApiKeys | None:
        """The keys that are valid for a call."""
        path: str = scope["path"]
        # CORS preflight requests have no key.
        if scope["method"] == "OPTIONS":
            return None
        if path in METRICS_PATHS:
            return self._metrics_keys
        is_open = path in OPEN_PATHS or path.startswith(self._open_prefixes or ("\0",))
        return None if is_open else self._keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
