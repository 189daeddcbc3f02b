"""Serving on a socket until a signal, with limits of connections: timeouts, headers, unauthenticated ones."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
import sys
import time
from asyncio import WriteTransport
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from hpu_duo.garbage import IdleCollector, short_collections
from hpu_duo.server.answers.answer import as_json
from hpu_duo.server.http.auth import LET_IN
from hpu_duo.server.http.middleware import DirectWrites
from hpu_duo.server.protocol import ApiError
from hpu_duo.server.running.admission import Stage


def unsent_bytes(transport: WriteTransport) -> int:
    """Return the bytes that the peer has not acknowledged; outside of Linux, those not written.

    Unwritten bytes are not acknowledged either. With TLS, event loops do not report them.
    """
    if sys.platform != "linux":
        return transport.get_write_buffer_size()
    import fcntl
    import termios

    try:
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # the socket is closed
        return 0
    return int(struct.unpack("i", found)[0])


_LOOK_S, _LOOKS = 0.1, 3
"""Polls, and seconds between them, of an empty send buffer before a TLS connection is aborted: the peer need
not confirm the end."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections, which apply before authentication.

    Attributes:
        head_s: timeout of the next call's headers, from the start of the connection or the last answer on.
        body_rate: minimum rate of a body in bytes per second, after the first ``head_s``.
        unread_s: timeout for a caller that reads nothing of an answer.
        max_fields: most header fields of a call.
        max_head_bytes: most bytes of its request line and headers.
        max_unauthenticated: most connections of one address without a call with a key, or without any call if
            there are no keys; with one more, the oldest is closed.
    """

    # Longer than clients keep connections alive (httpx 5 s, aiohttp 15 s, vLLM's load generator 60 s), so
    # that no call is sent on one that is being closed.
    head_s: float = 75.0
    body_rate: float = 16 * 2**10
    unread_s: float = 300.0
    max_fields: int = 256
    max_head_bytes: int = 64 * 2**10
    max_unauthenticated: int = 4096

    def __post_init__(self) -> None:
        if self.max_unauthenticated < 1:
            raise ValueError(f"expected max_unauthenticated of 1 or more, got {self.max_unauthenticated}")


class Connections:
    """Factory of the protocols of a server's connections.

    Args:
        limits: of them.
        needs_key: whether only calls with a key authenticate a connection.
    """

    def __init__(self, limits: ConnectionLimits, *, needs_key: bool) -> None:
        self.limits, self.needs_key = limits, needs_key
        self._unknown: defaultdict[str, OrderedDict[LimitedProtocol, None]] = defaultdict(OrderedDict)

    def __call__(self, **named: Any) -> LimitedProtocol:
        """Create a protocol, for uvicorn."""
        return LimitedProtocol(self, **named)

    def began(self, connection: LimitedProtocol, address: str) -> None:
        """Count an unauthenticated connection."""
        unknown = self._unknown[address]
        unknown[connection] = None
        if len(unknown) > self.limits.max_unauthenticated:
            next(iter(unknown)).abort()

    def known(self, connection: LimitedProtocol, address: str) -> None:
        """Uncount a connection that is authenticated or closed."""
        if (unknown := self._unknown.get(address)) is not None:
            unknown.pop(connection, None)
            if not unknown:
                del self._unknown[address]


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits. Its own keep-alive timer starts only after an answer.

    Args:
        made_by: the factory, with the limits.
        named: see ``HttpToolsProtocol``.
    """

    def __init__(self, made_by: Connections, **named: Any) -> None:
        super().__init__(**named)
        self._made_by, self._limits = made_by, made_by.limits
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._address = ""
        # Bytes parsed since the last callback of the parser.
        self._num_silent = 0
        self._num_fields = self._num_head_bytes = 0
        self._refusal: ApiError | None = None
        self._is_ending = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first call."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._wait(self._limits.head_s)
        self._made_by.began(self, self._address)

    def connection_lost(self, exc: Exception | None) -> None:
        """Uncount the connection."""
        self._made_by.known(self, self._address)
        self._wait(None)
        self.resume_writing()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Abort the connection."""
        self._made_by.known(self, self._address)
        self.transport.abort()

    def shutdown(self) -> None:
        """Close after the current answer, or at once if there is none."""
        cycle = self.cycle
        self._is_ending = True
        if cycle is None or cycle.response_complete:
            self._end()
        elif cycle.more_body and not cycle.response_started:
            self.transport.abort()
        else:
            super().shutdown()

    def _end(self) -> None:
        """Close the connection after its send buffer; with TLS, whether or not the peer responds."""
        self.transport.close()
        if self.scheme == "https":
            self._cut_once_sent(_LOOKS)

    def _cut_once_sent(self, num_looks: int) -> None:
        if self not in self.connections:
            return  # the connection is closed
        num_looks = _LOOKS if unsent_bytes(self.transport) else num_looks - 1
        if num_looks:
            self.loop.call_later(_LOOK_S, self._cut_once_sent, num_looks)
        else:
            self.transport.abort()

    # Headers

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        self._num_silent += len(data)
        super().data_received(data)
        if self._num_silent > self._limits.max_head_bytes and not self.transport.is_closing():
            self._refusal = self._too_long()
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """Start a call."""
        super().on_message_begin()
        self._num_fields = self._num_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Parse a part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Parse a header field, or a trailer."""
        self._num_fields += 1
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application, and the timer of the body."""
        self._num_silent = 0
        cast(Any, self.scope)["extensions"] = {LET_IN: self._let_in}
        if not self._made_by.needs_key:
            self._let_in()
        self._wait(self._limits.head_s)
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Reject invalid or oversized HTTP."""
        error, self._refusal = self._refusal, None
        if error is None:
            super().send_400_response(msg)
            return
        body = as_json(error.body)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        limits = self._limits
        if self._num_head_bytes > limits.max_head_bytes or self._num_fields > limits.max_fields:
            self._refusal = self._too_long()
            # The parser stops, and the error is sent.
            raise ValueError(str(self._refusal))

    def _too_long(self) -> ApiError:
        limits = self._limits
        message = (
            f"expected at most {limits.max_fields} header fields, and {limits.max_head_bytes:,} bytes of "
            "request line and headers"
        )
        return ApiError(431, message, code="headers_too_long")

    def _let_in(self) -> None:
        self._made_by.known(self, self._address)

    # Time

    def on_body(self, body: bytes) -> None:
        """Receive a part of a body."""
        self._num_silent = 0
        if self._timer is not None:
            self._wait(self._timer.when() - self.loop.time() + len(body) / self._limits.body_rate)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timer until the answer; after it, start that of the next call."""
        self._num_silent = 0
        self._wait(self._limits.head_s if self.cycle.response_complete else None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the timer of the next call, unless it is pipelined."""
        super().on_response_complete()
        self._unset_keepalive_if_required()
        if self._is_ending:
            self._end()
        elif self.cycle.response_complete:
            self._wait(self._limits.head_s)

    def _wait(self, seconds: float | None) -> None:
        """Set the timer in seconds; None stops it."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._timed_out)

    def _timed_out(self) -> None:
        if self.flow.read_paused:
            # Reading is paused during an answer.
            self._wait(self._limits.head_s)
        else:
            self.transport.abort()

    def pause_writing(self) -> None:
        """Start the timer of unread data."""
        super().pause_writing()
        self._watch_writing(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stop the timer of unread data."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch_writing(self, num_bytes: int) -> None:
        self._write_timer = self.loop.call_later(self._limits.unread_s, self._look_at_writing, num_bytes)

    def _look_at_writing(self, num_bytes: int) -> None:
        if (left := self.transport.get_write_buffer_size()) < num_bytes:
            self._watch_writing(left)
        else:
            self.transport.abort()


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
