"""Options of several servers of the same model behind one address."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from hpu_duo.extras import install_command

if TYPE_CHECKING:
    from hpu_duo.replicas.front import Front
    from hpu_duo.server.config import ServerConfig

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
        from hpu_duo.device.cores import shares_of_this_machine
        from hpu_duo.device.processes import replica_environments
        from hpu_duo.replicas.config import FrontConfig
        from hpu_duo.replicas.front import Front
        from hpu_duo.replicas.process import ReplicaCommand

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
