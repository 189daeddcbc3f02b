"""A process that listens, and ends on a signal."""

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
"""A caller that has not acknowledged anything for so long is taken for gone."""
_FAILURE_TOLD_S = 1.0
"""A server that has failed answers with 503 for so long, and then ends without waiting for anybody."""


class Draining(Protocol):
    """A service that a server lets end, such as ``Service``."""

    @property
    def stage(self) -> Stage:
        """The stage of its life."""
        ...

    async def drain(self) -> bool:
        """Take nothing new, and let what is under way end; returns whether all of it has."""
        ...


@dataclass(frozen=True)
class Tls:
    """Files of a server that is called by https.

    Attributes:
        certificate, key: PEM files.
        key_password: of the key.
        client_certificates: PEM file of the authorities that callers' certificates must come from; None asks
            for none.
    """

    certificate: Path
    key: Path | None = None
    key_password: str | None = None
    client_certificates: Path | None = None


@dataclass(frozen=True)
class Ending:
    """The end of a server.

    Attributes:
        signal_number: what told it to; None when it ended by itself, which is a failure.
        is_drained: whether every request under way has ended by itself.
    """

    signal_number: int | None
    is_drained: bool


def bind(host: str, port: int) -> socket.socket:
    """A socket that will listen there.

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
            # Connections have it from the socket that they were accepted from.
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_S * 1000)
        bound.bind(info[4])
    except (OSError, UnicodeError) as error:
        raise ValueError(f"cannot listen on {host}, port {port}: {error}") from error
    return bound


def bound_socket(number: int) -> socket.socket:
    """The bound socket that a process inherited, by its number.

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
    """Serve until a signal comes, then let requests end; a second signal ends them at once.

    Args:
        app: of ``create_app``.
        service: what the application serves with.
        bound: see ``bind``; closed at the end.
        connections: makes and limits them.
        on_listening: called once connections are accepted.
        flush_s: seconds in which slow callers may take the rest of their answers, once all are generated.
    """
    _raise_file_limit()
    server = DrainingServer(app, service, tls, on_listening, connections, flush_s)
    with short_collections():
        server.run(sockets=[bound])
    return server.ending


class DrainingServer(uvicorn.Server):
    """Goes on answering while requests end: new ones with 503, so that callers turn to another server.

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
        self.failure_told_s = _FAILURE_TOLD_S
        self._collector = IdleCollector()

    @property
    def ending(self) -> Ending:
        """The end, once it has come."""
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
            return self._is_failure_told() or await super().on_tick(counter)
        if self._draining is not None and self._draining.done():
            return True
        return await super().on_tick(counter)

    def _is_failure_told(self) -> bool:
        """Whether callers and probes have had the time to hear of a failure."""
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            self.config.timeout_graceful_shutdown = 0
        return time.monotonic() - self._failed_at >= self.failure_told_s

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
