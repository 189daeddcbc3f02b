"""Options of a server: where it listens, what calls may request, what it reports, and replicas."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from hpu_duo.cli.options import SettingsOf, option_in
from hpu_duo.extras import install_command
from hpu_duo.server.config import CALLS, LISTENING, OBSERVABILITY, ServerConfig
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.fleet.replicas.front import Front
    from hpu_duo.server.http.listening import Connections, Tls
    from hpu_duo.server.telemetry.request_log import RequestLog
    from hpu_duo.server.telemetry.tracing import Tracing

_calls_option = option_in(CALLS)
_listening_option = option_in(LISTENING)
_observability_option = option_in(OBSERVABILITY)


@dataclass(frozen=True)
class ListeningOptions:
    """Options of where a server listens, and who may call."""

    host: Annotated[str, _listening_option("Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, _listening_option("Port; 0 = any free one.")] = 8000
    fd: Annotated[
        int | None,
        _listening_option(
            "Listen on this bound socket, which the parent process has bound, instead of --port.",
            metavar="NUMBER",
            show_default="none",
        ),
    ] = None
    ends_with_stdin: Annotated[
        bool, typer.Option("--ends-with-stdin", help="Stop when standard input ends.", hidden=True)
    ] = False
    api_key: Annotated[
        list[str] | None,
        _listening_option(
            "Callers must have one of these keys; repeat for several.",
            envvar="HPU_DUO_API_KEY",
            metavar="KEY",
            show_default="everybody may call",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None, _listening_option("File with one key in each line.", metavar="FILE", show_default="none")
    ] = None
    metrics_api_key: Annotated[
        list[str] | None,
        _listening_option(
            "Who reads /metrics and /stats must have one of these keys; repeat for several.",
            envvar="HPU_DUO_METRICS_API_KEY",
            metavar="KEY",
            show_default="everybody may read them",
        ),
    ] = None
    allowed_origin: Annotated[
        list[str] | None,
        _listening_option(
            "Pages from there may call (CORS); repeat for several, * for all.",
            metavar="URL",
            show_default="none",
        ),
    ] = None
    ssl_certfile: Annotated[
        Path | None,
        _listening_option("Certificate, to be called by https.", metavar="FILE", show_default="none"),
    ] = None
    ssl_keyfile: Annotated[
        Path | None, _listening_option("Its key.", metavar="FILE", show_default="none")
    ] = None
    ssl_keyfile_password: Annotated[
        str | None,
        _listening_option("The key's password.", envvar="HPU_DUO_SSL_KEYFILE_PASSWORD", show_default="none"),
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        _listening_option(
            "Callers must have a certificate of one of these authorities.",
            metavar="FILE",
            show_default="none",
        ),
    ] = None

    max_unauthenticated_connections: Annotated[
        int,
        _listening_option(
            "Connections of one address without a call that has a key, or without keys without a call; "
            "with more, the one that waits longest is closed."
        ),
    ] = 4096

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
        from hpu_duo.server.http.listening import ConnectionLimits, Connections

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


@dataclass(frozen=True)
class ObservabilityOptions:
    """Options of the log and the traces of calls."""

    log_requests: Annotated[
        Path | None,
        _observability_option(
            "Append a line of JSON for each call, without prompts and answers; - for standard output.",
            metavar="FILE",
            show_default="not logged",
        ),
    ] = None
    log_prompts: Annotated[bool, _observability_option("Write prompts into it as well.", "--log-prompts")] = (
        False
    )
    otlp_traces_endpoint: Annotated[
        str | None,
        _observability_option(
            "Send a span for each call there, by OTLP over HTTP.",
            envvar="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            metavar="URL",
            show_default="no traces",
        ),
    ] = None

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


Served = Annotated[dict[str, Any], SettingsOf(ServerConfig, answer_memory=None)]
"""Settings of a server that are options as they are."""


@dataclass(frozen=True)
class CallOptions:
    """Options of what calls may request, and what they are answered."""

    served_model_name: Annotated[
        list[str] | None,
        _calls_option(
            "Name of the model in the API; repeat for several.",
            metavar="NAME",
            show_default="its id on the hub, or that of its directory",
        ),
    ] = None
    chat_template: Annotated[
        Path | None, _calls_option("Chat template.", metavar="FILE", show_default="the checkpoint's")
    ] = None
    generation_config: Annotated[
        str, _calls_option("Defaults of sampling: auto (the checkpoint's) or none (the API's).")
    ] = "auto"

    def config(
        self, model: Path | None, served: Mapping[str, Any], listening: ListeningOptions
    ) -> ServerConfig:
        """Settings of the server.

        Args:
            model: None is the built-in model.
            served: fields of ``ServerConfig`` that are options.

        Raises:
            ValueError: a value is out of range, or a file cannot be read.
        """
        from hpu_duo.modeling.hub import model_name
        from hpu_duo.server.tools import resolve_parser

        resolve_parser(served.get("tool_call_parser", ServerConfig.tool_call_parser))
        if self.generation_config not in ("auto", "none"):
            raise ValueError(f"expected --generation-config of auto or none, got {self.generation_config!r}")
        own_name = "builtin" if model is None else model_name(model) if model.exists() else str(model)
        most = max(ServerConfig.answer_memory_bytes, served.get("max_answer_bytes", 0))
        given = {"answer_memory_bytes": most, **served}
        return ServerConfig(
            model_names=tuple(self.served_model_name or (own_name,)),
            api_keys=listening.keys,
            metrics_api_keys=tuple(listening.metrics_api_key or ()),
            allowed_origins=tuple(listening.allowed_origin or ()),
            chat_template=None if self.chat_template is None else _read_template(self.chat_template),
            uses_generation_config=self.generation_config == "auto",
            **given,
        )


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read --chat-template {file}: {error}") from error


_replicas_option = option_in("Replicas")

_OF_THE_FRONT = frozenset(
    (
        *("--replicas", "--router", "--replica-load-seconds", "--host", "--port", "--fd", "--allowed-origin"),
        *("--ssl-certfile", "--ssl-keyfile", "--ssl-keyfile-password", "--ssl-ca-certs"),
        "--max-unauthenticated-connections",
    )
)
"""Options with a value that replicas are started without."""

_OF_THE_HOST = ("cpu", "hpu-sim")
"""Devices of which every process has as many as it likes."""


@dataclass(frozen=True)
class ServedReplicas:
    """Options of replicas and of the router before them."""

    replicas: Annotated[
        int | None,
        _replicas_option(
            "Number of processes of this command, each with devices of its own, behind one address.",
            show_default="one process",
        ),
    ] = None
    router: Annotated[
        str | None,
        _replicas_option(
            "With --replicas, the router of calls: e2, d2lpm, cache-aware, least-loaded or "
            "round-robin; docs/replicas.md has the options.",
            metavar="NAME[:OPTION=VALUE,...]",
            show_default="e2",
        ),
    ] = None
    replica_load_seconds: Annotated[
        float | None,
        _replicas_option(
            "Seconds in which a replica has to have read its model, before it is started again.",
            show_default="3600",
        ),
    ] = None

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            ValueError: a router without replicas, or a package that is missing.
        """
        if self.replicas is None and self.router is not None:
            raise ValueError("expected --replicas with --router, got --router alone")
        if self.replicas is None and self.replica_load_seconds is not None:
            raise ValueError("expected --replica-load-seconds with --replicas")
        if self.replicas is not None and find_spec("aiohttp") is None:
            raise ValueError(f"expected aiohttp for --replicas: {install_command('serve')}")

    def front(self, config: ServerConfig, device: str | None, num_devices: int) -> Front:
        """The front process' own part.

        Args:
            device: as asked for.
            num_devices: of each replica.

        Raises:
            ValueError: there are fewer devices than that, or no such router.
        """
        from hpu_duo.device.processes import replica_environments, shares_of_this_machine
        from hpu_duo.fleet.replicas.front import Front, FrontConfig
        from hpu_duo.fleet.replicas.replica import ReplicaCommand

        assert self.replicas is not None, "asked before"
        limit_s = self.replica_load_seconds
        front = FrontConfig(
            config,
            self.replicas,
            self.router or FrontConfig.router,
            FrontConfig.load_timeout_s if limit_s is None else limit_s,
        )
        arguments = [sys.executable, "-m", "hpu_duo.cli", *replica_arguments(sys.argv[1:])]
        is_of_the_host = device is not None and device.startswith(_OF_THE_HOST)
        environments = replica_environments(self.replicas, 0 if is_of_the_host else num_devices)
        cores = shares_of_this_machine(self.replicas)
        return Front(front, [ReplicaCommand(arguments, *each) for each in zip(environments, cores)])


def replica_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a replica: those of the front process, without what is the front's own."""
    found: list[str] = []
    is_value = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if is_value:
            is_value = False
        elif name.replace("_", "-") in _OF_THE_FRONT:
            is_value = not equals
        else:
            found.append(argument)
    return found


_profile_option = option_in("Profile")


class StepProfiler(Protocol):
    """A profiler of consecutive steps, such as ``hpu_duo.lab.step_profiler.StepProfiler``."""

    @property
    def trace(self) -> Path | None:
        """File that was written; None until then."""
        ...

    @property
    def remaining(self) -> int:
        """Steps that are still to be profiled."""
        ...

    def stepped(self) -> None:
        """A step has ended."""
        ...


class MakeProfiler(Protocol):
    """Makes a profiler; it is imported only when one is wanted."""

    def __call__(self, device: str, directory: Path, num_steps: int, num_skipped: int) -> StepProfiler:
        """See ``hpu_duo.lab.step_profiler.StepProfiler``."""
        ...


_plugged: list[MakeProfiler] = []


def plug_in(make: MakeProfiler) -> None:
    """Set what ``ProfileOptions.profiler`` calls; nothing that serves imports a profiler itself."""
    _plugged[:] = [make]


@dataclass(frozen=True)
class ProfileOptions:
    """Options of a profile of some steps; on HPU the vendor's profiler takes part."""

    profile_steps: Annotated[
        int | None,
        _profile_option(
            "Profile this number of steps after the warm-up, and write one trace.",
            metavar="N",
            show_default="none",
        ),
    ] = None
    profile_dir: Annotated[
        Path | None, _profile_option("Directory for the trace.", metavar="DIR", show_default="none")
    ] = None
    profile_after: Annotated[int, _profile_option("Steps that are left out before them.")] = 1

    def check(self) -> None:
        """Refuse what does not fit together; needs no torch.

        Raises:
            ValueError: one of steps and directory without the other.
        """
        if (self.profile_steps is None) is not (self.profile_dir is None):
            raise ValueError("expected --profile-steps and --profile-dir together, got one of them")

    def profiler(self, device: str) -> StepProfiler | None:
        """Make the profiler; None if no steps are to be profiled.

        Args:
            device: name of the engine's runtime.

        Raises:
            ValueError: see ``check``, or what the profiler refuses.
        """
        self.check()
        if self.profile_steps is None or self.profile_dir is None:
            return None
        (make,) = _plugged
        return make(device, self.profile_dir, self.profile_steps, self.profile_after)
