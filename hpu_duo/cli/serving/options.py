"""Options of what calls may request, of the engine that serves them, and of several replicas."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from hpu_duo.cli.serving.listening_options import ListeningOptions, TellingOptions
from hpu_duo.cli.terminal.sizes import parse_bytes
from hpu_duo.extras import install_command

if TYPE_CHECKING:
    from hpu_duo.fleet.replicas.front import Front
    from hpu_duo.server.config import ServerConfig

_CALLS = "Calls"


@dataclass(frozen=True)
class CallOptions:
    """Options of what calls may request, and what they are answered."""

    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name of the model in the API; repeat for several.",
            show_default="its id on the hub, or that of its directory",
            rich_help_panel=_CALLS,
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Chat template.", show_default="the checkpoint's", rich_help_panel=_CALLS
        ),
    ] = None
    tool_call_parser: Annotated[
        str,
        typer.Option(
            help="Format of tool calls: auto (by the chat template), hermes, llama3_json or none.",
            rich_help_panel=_CALLS,
        ),
    ] = "auto"
    generation_config: Annotated[
        str,
        typer.Option(
            help="Defaults of sampling: auto (the checkpoint's) or none (the API's).", rich_help_panel=_CALLS
        ),
    ] = "auto"
    max_queue: Annotated[
        int,
        typer.Option(
            help="Samples that may wait besides those that run; more are answered with 429.",
            rich_help_panel=_CALLS,
        ),
    ] = 2048
    max_body_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Longest body of a call.", rich_help_panel=_CALLS)
    ] = "64MiB"
    max_choices: Annotated[
        int, typer.Option(help="Most choices of one call: prompts times n.", rich_help_panel=_CALLS)
    ] = 256
    max_logprobs: Annotated[
        int,
        typer.Option(help="Most logprobs and top_logprobs; -1 for any number.", rich_help_panel=_CALLS),
    ] = 20
    max_answer_size: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Most memory of the outputs of one call.", rich_help_panel=_CALLS),
    ] = "256MiB"
    answer_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most memory of the outputs of all calls together: 1GiB, or --max-answer-size if that is "
            "more. With more, the call that takes most is ended and new ones get 503.",
            rich_help_panel=_CALLS,
        ),
    ] = None
    drain_seconds: Annotated[
        float,
        typer.Option(
            help="After SIGTERM or Ctrl-C, so long for calls under way to end.", rich_help_panel=_CALLS
        ),
    ] = 30.0
    flush_seconds: Annotated[
        float,
        typer.Option(
            help="Behind that, so long for slow callers to get the rest of their answers.",
            rich_help_panel=_CALLS,
        ),
    ] = 5.0

    def config(
        self, model: Path | None, listening: ListeningOptions, telling: TellingOptions
    ) -> ServerConfig:
        """Settings of the server.

        Args:
            model: None is the built-in model.

        Raises:
            ValueError: a value is out of range, or a file cannot be read.
        """
        from hpu_duo.modeling.hub import model_name
        from hpu_duo.server.config import ServerConfig
        from hpu_duo.server.tools import resolve_parser

        resolve_parser(self.tool_call_parser)
        if self.generation_config not in ("auto", "none"):
            raise ValueError(f"expected --generation-config of auto or none, got {self.generation_config!r}")
        own_name = "builtin" if model is None else model_name(model) if model.exists() else str(model)
        return ServerConfig(
            model_names=tuple(self.served_model_name or (own_name,)),
            api_keys=listening.keys,
            metrics_api_keys=tuple(listening.metrics_api_key or ()),
            shares_prefixes=listening.share_prefixes,
            max_queue=self.max_queue,
            max_body_bytes=parse_bytes(self.max_body_size),
            max_choices=self.max_choices,
            max_logprobs=self.max_logprobs,
            max_answer_bytes=parse_bytes(self.max_answer_size),
            answer_memory_bytes=parse_bytes(self.answer_memory)
            if self.answer_memory
            else max(ServerConfig.answer_memory_bytes, parse_bytes(self.max_answer_size)),
            drain_seconds=self.drain_seconds,
            flush_seconds=self.flush_seconds,
            allowed_origins=tuple(listening.allowed_origin or ()),
            chat_template=None if self.chat_template is None else _read_template(self.chat_template),
            tool_call_parser=self.tool_call_parser,
            uses_generation_config=self.generation_config == "auto",
            has_page=listening.page,
            metrics_namespace=telling.metrics_namespace,
        )


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read --chat-template {file}: {error}") from error


_REPLICAS = "Replicas"

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
        typer.Option(
            help="Serve by so many processes of this command, each with devices of its own, behind one "
            "address.",
            show_default="one process",
            rich_help_panel=_REPLICAS,
        ),
    ] = None
    router: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            help="With --replicas, which one gets a call: e2, d2lpm, cache-aware, least-loaded or "
            "round-robin; "
            "docs/replicas.md has the options.",
            show_default="e2",
            rich_help_panel=_REPLICAS,
        ),
    ] = None
    replica_load_seconds: Annotated[
        float | None,
        typer.Option(
            help="Seconds in which a replica has to have read its model, before it is started again.",
            show_default="3600",
            rich_help_panel=_REPLICAS,
        ),
    ] = None

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            ValueError: a router without replicas, or a package that is missing.
        """
        if self.replicas is None and self.router is not None:
            raise ValueError("expected --router with --replicas")
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
        from hpu_duo.fleet.replicas.config import FrontConfig
        from hpu_duo.fleet.replicas.front import Front
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


_PROFILE = "Profile"


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
        typer.Option(
            metavar="N",
            help="Profile so many steps behind the warm-up, and write one trace.",
            show_default="none",
            rich_help_panel=_PROFILE,
        ),
    ] = None
    profile_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory for the trace.", show_default="none", rich_help_panel=_PROFILE
        ),
    ] = None
    profile_after: Annotated[
        int, typer.Option(help="Steps that are left out before them.", rich_help_panel=_PROFILE)
    ] = 1

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
