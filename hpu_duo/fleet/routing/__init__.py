"""Routers: which of several replicas of one model serves a request.

Plain classes, without a device, a network or a clock: the server's front process, simulations and Ray Serve
use the same ones.
"""

from collections.abc import Callable

from hpu_duo.fleet.routing.e2 import E2
from hpu_duo.fleet.routing.prefix_map import PrefixMap
from hpu_duo.fleet.routing.prefix_router import D2LPM, CacheAware
from hpu_duo.fleet.routing.router import (
    Dispatch,
    LeastLoaded,
    NoReplicaError,
    RoundRobin,
    RoutedRequest,
    Router,
)
from hpu_duo.option_spec import call_with_options

__all__ = [
    "D2LPM",
    "E2",
    "ROUTERS",
    "CacheAware",
    "Dispatch",
    "LeastLoaded",
    "NoReplicaError",
    "PrefixMap",
    "RoundRobin",
    "RoutedRequest",
    "Router",
    "make_router",
]

ROUTERS: dict[str, Callable[..., Router]] = {
    "e2": E2,
    "d2lpm": D2LPM,
    "cache-aware": CacheAware,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
}
"""Routers by name."""


def make_router(name: str) -> Router:
    """Create a router from its name and options, such as ``e2:window_s=60,capacity=200000``.

    Raises:
        ValueError: there is none of this name, or it has no such option or not with this value.
    """
    router = call_with_options("router", name, ROUTERS)
    router.name = name
    return router
