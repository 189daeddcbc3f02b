"""``hpu-duo serve --replicas``: the front process."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

import typer

from hpu_duo.cli.serving.ends import exit_as

if TYPE_CHECKING:
    from hpu_duo.replicas.front import Front
    from hpu_duo.server.http.connections import Connections
    from hpu_duo.server.http.listening import Tls


def serve_replicas(
    front: Front, bound: socket.socket, connections: Connections, tls: Tls | None, host: str
) -> None:
    """Serve with replicas until a signal comes.

    Args:
        bound: listens for callers.
        connections: limits theirs.
        host: for the address that is printed.
    """
    from hpu_duo.replicas.app import create_front_app
    from hpu_duo.server.http.listening import listen

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    place = f"{'http' if tls is None else 'https'}://{host}:{bound.getsockname()[1]}"
    config = front.config

    def tell() -> None:
        names = ", ".join(config.server.model_names)
        typer.echo(
            f"hpu-duo: {config.num_replicas} replicas of {names} behind {place}, by {config.router}", err=True
        )

    ending = listen(
        create_front_app(front), front, bound, connections, tls, tell, config.server.flush_seconds
    )
    exit_as(ending, "no replica could be started; see above")
