"""The request router of Ray Serve, which delegates to one of ``hpu_duo.fleet.routing``.

Written for the interface of Ray 2.49 to 2.60, which Ray calls alpha (``ray.serve.request_router``).
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from hpu_duo.fleet.ray_serve.shared_router import SharedRouter, Ticket, announce
from hpu_duo.fleet.routing import make_router


class PolicyRouter(RequestRouter):
    """Sends a call to the choice of a router of this project, or to the next replica that accepts it.

    Calls carry a ``Ticket`` among their arguments. One without is sent to the shortest queue.
    """

    def initialize_state(self, router: str = "e2", **unknown: Any) -> None:
        """Create the router.

        Args:
            router: name with options, see ``hpu_duo.fleet.routing.make_router``.

        Raises:
            ValueError: there is no such router, or an argument is unknown.
        """
        if unknown:
            raise ValueError(f"expected router among request_router_kwargs and nothing else, got {unknown}")
        self._shared = SharedRouter(make_router(router))
        announce(self._deployment_id.app_name, self._deployment_id.name, self._shared)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called with the current replicas."""
        super().update_replicas(replicas)
        self._shared.set_replicas(_name(each.replica_id) for each in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called when a replica has died."""
        super().on_replica_actor_died(replica_id)
        self._shared.lose(_name(replica_id))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, the one that the router chooses first, each in a rank of its own."""
        if pending_request is not None:
            # Otherwise Ray retries without a pause while every replica is full.
            pending_request.routing_context.should_backoff = True
        by_name = {_name(each.replica_id): each for each in candidate_replicas}
        return [[by_name[name]] for name in self._shared.rank(_ticket(pending_request), list(by_name))]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Called when a replica has accepted a call."""
        if (ticket := _ticket(pending_request)) is not None:
            self._shared.sent(ticket, _name(replica_id))


def _name(replica_id: ReplicaID) -> str:
    name: str = replica_id.unique_id
    return name


def _ticket(pending: PendingRequest | None) -> Ticket | None:
    found = () if pending is None else (*pending.args, *pending.kwargs.values())
    return next((each for each in found if isinstance(each, Ticket)), None)
