"""Options of where a server listens, and of what it tells."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpu_duo.extras import install_command
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.server.http.connections import Connections
    from hpu_duo.server.http.listening import Tls
    from hpu_duo.server.telemetry.request_log import RequestLog
    from hpu_duo.server.telemetry.tracing import Tracing

_LISTENING = "Listening"


@dataclass(frozen=True)
class ListeningOptions:
    """Options of where a server listens, and who may call."""

    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all.", rich_help_panel=_LISTENING)
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port; 0 takes one that is free.", rich_help_panel=_LISTENING)] = (
        8000
    )
    fd: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            help="Listen on this bound socket, which the parent process has bound, instead of --port.",
            show_default="none",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    ends_with_stdin: Annotated[
        bool, typer.Option("--ends-with-stdin", help="Stop when standard input ends.", hidden=True)
    ] = False
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="HPU_DUO_API_KEY",
            metavar="KEY",
            help="Callers must have one of these keys; repeat for several.",
            show_default="everybody may call",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with one key in each line.",
            show_default="none",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    share_prefixes: Annotated[
        bool,
        typer.Option(
            "--share-prefixes",
            help="Let callers with different keys share what is cached of their prompts; they can tell by "
            "cached_tokens what others have sent.",
            rich_help_panel=_LISTENING,
        ),
    ] = False
    metrics_api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="HPU_DUO_METRICS_API_KEY",
            metavar="KEY",
            help="Who reads /metrics and /stats must have one of these keys; repeat for several.",
            show_default="everybody may read them",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Pages from there may call (CORS); repeat for several, * for all.",
            show_default="none",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Certificate, to be called by https.",
            show_default="none",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Its key.", show_default="none", rich_help_panel=_LISTENING),
    ] = None
    ssl_keyfile_password: Annotated[
        str | None,
        typer.Option(
            envvar="HPU_DUO_SSL_KEYFILE_PASSWORD",
            help="The key's password.",
            show_default="none",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Callers must have a certificate of one of these authorities.",
            show_default="none",
            rich_help_panel=_LISTENING,
        ),
    ] = None

    max_unauthenticated_connections: Annotated[
        int,
        typer.Option(
            help="Connections of one address without a call that has a key, or without keys without a call; "
            "with more, the one that waits longest is closed.",
            rich_help_panel=_LISTENING,
        ),
    ] = 4096
    page: Annotated[
        bool,
        typer.Option("--page/--no-page", help="Answer / with a page to chat on.", rich_help_panel=_LISTENING),
    ] = True

    def bound(self) -> socket.socket:
        """The socket to listen on.

        Raises:
            ValueError: it cannot be had.
        """
        from hpu_duo.server.http.listening import bind, bound_socket

        return bind(self.host, self.port) if self.fd is None else bound_socket(self.fd)

    @property
    def connections(self) -> Connections:
        """Limits of connections.

        Raises:
            ValueError: a value is out of range.
        """
        from hpu_duo.server.http.connections import ConnectionLimits, Connections

        most = self.max_unauthenticated_connections
        return Connections(ConnectionLimits(max_unauthenticated=most), needs_key=bool(self.keys))

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key.

        Raises:
            ValueError: the file cannot be read, or has none.
        """
        from hpu_duo.server.config import read_api_keys

        given = tuple(self.api_key or ())
        return given if self.api_key_file is None else given + read_api_keys(self.api_key_file)

    @property
    def tls(self) -> Tls | None:
        """Files of https; None without.

        Raises:
            ValueError: a file is missing, or one is given that belongs to another.
        """
        from hpu_duo.server.http.listening import Tls

        files = (self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
        for file in files:
            if file is not None and not file.is_file():
                raise ValueError(
                    f"expected a file of --ssl-certfile, --ssl-keyfile or --ssl-ca-certs, got {file}"
                )
        if self.ssl_certfile is None:
            if any(file is not None for file in files):
                raise ValueError("expected --ssl-certfile with --ssl-keyfile and --ssl-ca-certs")
            return None
        return Tls(self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password, self.ssl_ca_certs)


_TELLING = "Telling"


@dataclass(frozen=True)
class TellingOptions:
    """Options of what a server tells of calls and steps."""

    log_requests: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Append a line of JSON for each call, without prompts and answers; - for standard output.",
            show_default="not logged",
            rich_help_panel=_TELLING,
        ),
    ] = None
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts into it as well.", rich_help_panel=_TELLING)
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            envvar="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            metavar="URL",
            help="Send a span for each call there, by OTLP over HTTP.",
            show_default="no traces",
            rich_help_panel=_TELLING,
        ),
    ] = None
    metrics_namespace: Annotated[
        str,
        typer.Option(
            help="Prefix of the metrics that mean what vLLM's mean; vllm lets its dashboards work.",
            rich_help_panel=_TELLING,
        ),
    ] = "hpuduo"

    def request_log(self) -> RequestLog | None:
        """The log of calls; None without.

        Raises:
            ValueError: its file cannot be written.
        """
        from hpu_duo.server.telemetry.request_log import RequestLog

        if self.log_requests is None:
            if self.log_prompts:
                raise ValueError("--log-prompts adds to the log of calls: expected --log-requests too")
            return None
        if str(self.log_requests) == "-":
            return RequestLog(None, has_prompts=self.log_prompts)
        check_file("--log-requests", self.log_requests)
        return RequestLog(self.log_requests, has_prompts=self.log_prompts)

    def tracing(self) -> Tracing | None:
        """Spans of calls; None without.

        Raises:
            ValueError: the packages are missing.
        """
        if not self.otlp_traces_endpoint:
            return None
        try:
            from hpu_duo.server.telemetry.tracing import Tracing
        except ImportError as error:
            raise ValueError(
                "--otlp-traces-endpoint needs the packages of the extra tracing: "
                f"{install_command('tracing')}"
            ) from error
        return Tracing(self.otlp_traces_endpoint)
