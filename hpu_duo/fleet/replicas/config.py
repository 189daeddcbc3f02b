"""Settings of a front process."""

from __future__ import annotations

from dataclasses import dataclass

from hpu_duo.fleet.routing import make_router
from hpu_duo.server.config import ServerConfig


@dataclass(frozen=True)
class FrontConfig:
    """Behaviour of a front process and its replicas.

    Attributes:
        server: of every replica; keys, limits of bodies, origins and the time to drain hold for the front as
            well.
        num_replicas: servers to run.
        router: name of the router, with options; see ``hpu_duo.fleet.routing.make_router``.
        load_timeout_s: seconds in which a replica has to have read its model; one that has not is killed and
            started again.

    Raises:
        ValueError: no replica, no such router, or no time to load.
    """

    server: ServerConfig
    num_replicas: int
    router: str = "e2"
    load_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"expected 1 replica or more, got {self.num_replicas}")
        make_router(self.router)
        if not self.load_timeout_s > 0:
            raise ValueError(f"expected load_timeout_s above 0, got {self.load_timeout_s}")
