"""Serving on a socket until a signal."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, cast

import uvicorn
from starlette.types import ASGIApp

from hpu_duo.garbage import IdleCollector, short_collections
from hpu_duo.server.http.connections import ConnectionLimits, Connections
from hpu_duo.server.http.middleware import DirectWrites
from hpu_duo.server.running.admission import Stage

_BACKLOG = 4096
_UNREAD_S = 300
"""TCP user timeout in seconds: a peer that acknowledges nothing for this long is disconnected."""
_FAILURE_VISIBLE_S = 1.0
"""Seconds for which a failed server responds with 503 before it exits."""


class Draining(Protocol):
    """A service that can be drained, such as ``Service``."""

    @property
    def stage(self) -> Stage:
        """The stage of its lifecycle."""
        ...

    async def drain(self) -> bool:
        """Reject new requests and wait for running ones; returns whether all have ended."""
        ...


@dataclass(frozen=True)
class Tls:
    """Files for TLS.

    Attributes:
        certificate, key: PEM files.
        key_password: of the key.
        client_certificates: PEM file of the authorities of callers' certificates; None = no client
            certificates.
    """

    certificate: Path
    key: Path | None = None
    key_password: str | None = None
    client_certificates: Path | None = None


@dataclass(frozen=True)
class Ending:
    """The end of a server.

    Attributes:
        signal_number: the signal; None if it ended by itself, which is a failure.
        is_drained: whether all running requests have completed.
    """

    signal_number: int | None
    is_drained: bool


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address.

    Raises:
        ValueError: it cannot.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"expected a port from 0 to 65535, got {port}")
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(info[0], info[1], info[2])
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Accepted connections inherit it.
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_S * 1000)
        bound.bind(info[4])
    except (OSError, UnicodeError) as error:
        raise ValueError(f"cannot listen on {host}, port {port}: {error}") from error
    return bound


def bound_socket(number: int) -> socket.socket:
    """Return the bound socket of an inherited file descriptor.

    Raises:
        ValueError: there is none.
    """
    try:
        bound = socket.socket(fileno=number)
        bound.getsockname()
    except OSError as error:
        raise ValueError(f"expected a socket as --fd {number}: {error.strerror}") from error
    return bound


def listen(
    app: ASGIApp,
    service: Draining,
    bound: socket.socket,
    connections: Connections,
    tls: Tls | None = None,
    on_listening: Callable[[], None] = lambda: None,
    flush_s: float = 5.0,
) -> Ending:
    """Serve until a signal, then drain; a second signal aborts requests at once.

    Args:
        app: of ``create_app``.
        service: of the application.
        bound: see ``bind``; closed at the end.
        connections: factory of protocols.
        on_listening: called once connections are accepted.
        flush_s: seconds for slow callers to read the rest of their answers, once all are generated.
    """
    _raise_file_limit()
    server = DrainingServer(app, service, tls, on_listening, connections, flush_s)
    with short_collections():
        server.run(sockets=[bound])
    return server.ending


class DrainingServer(uvicorn.Server):
    """A server that rejects new requests with 503 while draining, so that callers retry elsewhere.

    Args:
        app, service, tls, on_listening, connections, flush_s: see ``listen``.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Draining,
        tls: Tls | None = None,
        on_listening: Callable[[], None] = lambda: None,
        connections: Connections | None = None,
        flush_s: float = 5.0,
    ) -> None:
        config = uvicorn.Config(
            DirectWrites(app),
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            ws="none",
            lifespan="on",
            http=cast(Any, connections or Connections(ConnectionLimits(), needs_key=False)),
            timeout_graceful_shutdown=cast(Any, flush_s),
            **_tls_options(tls),
        )
        super().__init__(config)
        self._service, self._on_listening = service, on_listening
        self._signal_number: int | None = None
        self._draining: asyncio.Task[bool] | None = None
        self._failed_at: float | None = None
        self.failure_visible_s = _FAILURE_VISIBLE_S
        self._collector = IdleCollector()

    @property
    def ending(self) -> Ending:
        """The end, once the server has stopped."""
        is_drained = self._draining is not None and self._draining.done() and self._draining.result()
        return Ending(self._signal_number, is_drained)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        self._on_listening()

    async def on_tick(self, counter: int) -> bool:
        """Say, ten times a second, whether to end; garbage is collected while no call is under way."""
        self._collector.tick(is_idle=not self.server_state.tasks)
        if self._signal_number is not None and self._draining is None:
            self._draining = asyncio.create_task(self._service.drain())
        if self._service.stage is Stage.FAILED:
            return self._is_failure_seen() or await super().on_tick(counter)
        if self._draining is not None and self._draining.done():
            return True
        return await super().on_tick(counter)

    def _is_failure_seen(self) -> bool:
        """Whether callers and probes have had the time to hear of a failure."""
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            self.config.timeout_graceful_shutdown = 0
        return time.monotonic() - self._failed_at >= self.failure_visible_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self._signal_number is None:
            self._signal_number = sig
        else:
            self.should_exit = self.force_exit = True


def is_interrupt(ending: Ending) -> bool:
    """Whether Ctrl-C ended it."""
    return ending.signal_number == signal.SIGINT


def _tls_options(tls: Tls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    import ssl

    asks = tls.client_certificates is not None
    return {
        "ssl_certfile": tls.certificate,
        "ssl_keyfile": tls.key,
        "ssl_keyfile_password": tls.key_password,
        "ssl_ca_certs": tls.client_certificates,
        "ssl_cert_reqs": int(ssl.CERT_REQUIRED if asks else ssl.CERT_NONE),
    }


def _raise_file_limit() -> None:
    """Let the process have as many connections as the system allows it."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
