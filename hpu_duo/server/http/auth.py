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

METRICS_PATHS = frozenset({"/metrics", "/stats"})
"""Paths that may have keys of their own."""

PREFIX_NAMESPACE = "hpu_duo.prefix_namespace"
"""Name in an ASGI scope: calls of different ones share no cached prefix."""

LET_IN = "hpu_duo.let_in"
"""Name, among the extensions of an ASGI scope, of a function to call with a known key of a connection."""


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

    def admitted(self, authorization: str | None) -> str | None:
        """A name for the known key in a header; None if there is none. Every known key is compared."""
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return given.hex() if scheme.lower() == "bearer" and any(matches) else None


class StatePathMiddleware:
    """Takes ``OPEN_PATHS`` with a slash behind them for those without.

    Args:
        app: behind it.
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
    """Answers 401 to calls without a known key.

    Args:
        app: behind it.
        keys: of calls; none lets everybody call.
        metrics_keys: of ``METRICS_PATHS``; none lets everybody read them.
        shares_prefixes: give no call a ``PREFIX_NAMESPACE``; else each key has one of its own.
        open_prefixes: paths below these need no key, besides ``OPEN_PATHS``.
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
        """The keys of which a call needs one."""
        path: str = scope["path"]
        # Browsers ask for permission without a key (CORS).
        if scope["method"] == "OPTIONS":
            return None
        if path in METRICS_PATHS:
            return self._metrics_keys
        is_open = path in OPEN_PATHS or path.startswith(self._open_prefixes or ("\0",))
        return None if is_open else self._keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
