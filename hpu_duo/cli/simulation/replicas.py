"""Options of several replicas that are simulated behind a router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hpu_duo.simulate.fleet import Fleet

_REPLICAS = "Replicas"
_DEFAULT = "e2"


@dataclass(frozen=True)
class ReplicaOptions:
    """Options of replicas and routers."""

    replicas: Annotated[
        int | None,
        typer.Option(
            help="Engines behind a router, each on devices of its own.",
            show_default="one engine, no router",
            rich_help_panel=_REPLICAS,
        ),
    ] = None
    router: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            help="Routers to run side by side: e2, d2lpm, cache-aware, least-loaded or round-robin; "
            "docs/replicas.md has their options.",
            show_default=_DEFAULT,
            rich_help_panel=_REPLICAS,
        ),
    ] = None
    lose_replica: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NUMBER@SECONDS",
            help="Lose a replica at a time, numbered from 0; its requests are sent again.",
            show_default="none is lost",
            rich_help_panel=_REPLICAS,
        ),
    ] = None
    restart_seconds: Annotated[
        float,
        typer.Option(help="Time until a lost replica serves again.", rich_help_panel=_REPLICAS),
    ] = 60.0
    stale_prefixes: Annotated[
        bool,
        typer.Option(
            "--stale-prefixes",
            help="Do not tell routers how much of a prompt was cached.",
            rich_help_panel=_REPLICAS,
        ),
    ] = False

    @property
    def fleets(self) -> list[Fleet | None]:
        """Replicas behind each router; None is one engine without a router.

        Raises:
            ValueError: a router that there is not, or an option that wants --replicas.
        """
        from hpu_duo.routing import make_router
        from hpu_duo.simulate.fleet import Fleet
        from hpu_duo.simulate.replicated import Loss

        if self.replicas is None:
            if self.router or self.lose_replica or self.stale_prefixes:
                raise ValueError("expected --router, --lose-replica and --stale-prefixes with --replicas")
            return [None]
        if self.replicas < 1:
            raise ValueError(f"expected --replicas of 1 or more, got {self.replicas}")
        if not self.restart_seconds >= 0:
            raise ValueError(f"expected --restart-seconds of 0 or more, got {self.restart_seconds}")
        losses = tuple(Loss.parse(text, self.restart_seconds) for text in self.lose_replica or ())
        wrong = [each.replica for each in losses if each.replica >= self.replicas]
        if wrong:
            raise ValueError(f"expected --lose-replica below --replicas {self.replicas}, got {wrong[0]}")
        routers = self.router or [_DEFAULT]
        if len(set(routers)) < len(routers):
            raise ValueError(f"expected different routers, got {' '.join(routers)}")
        for name in routers:
            make_router(name)
        return [Fleet(self.replicas, name, losses, not self.stale_prefixes) for name in routers]
