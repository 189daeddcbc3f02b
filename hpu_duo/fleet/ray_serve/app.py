"""The application for Ray Serve: ``hpu_duo.fleet.ray_serve.app:build_app``; see docs/replicas.md."""

from ray import serve
from ray.serve import Application

from hpu_duo.fleet.ray_serve.arguments import RayServeArgs
from hpu_duo.fleet.ray_serve.engine import Engine
from hpu_duo.fleet.ray_serve.ingress import Ingress

_ROUTER = "hpu_duo.fleet.ray_serve.router.PolicyRouter"
_MOST_CALLS = 100_000
"""Calls that one ingress has open; engines set the limits."""


def build_app(args: RayServeArgs) -> Application:
    """Build the application: engines, and an ingress with a router.

    Args:
        args: what Ray calls arguments of an application builder, checked.
    """
    engines = serve.deployment(
        name="Engine",
        request_router_config={
            "request_router_class": _ROUTER,
            "request_router_kwargs": {"router": args.router},
        },
        **args.engine_options,
    )(Engine)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=1,
        max_ongoing_requests=_MOST_CALLS,
        graceful_shutdown_timeout_s=args.server_config().drain_seconds,
        ray_actor_options={"num_cpus": args.ingress_num_cpus},
    )(Ingress)
    return ingress.bind(engines.bind(args.engine_settings), args.ingress_settings)
