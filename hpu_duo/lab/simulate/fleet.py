"""Replicas of a server that is simulated, and the router before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpu_duo.fleet.routing import make_router
from hpu_duo.lab.simulate.forecast import Forecast
from hpu_duo.lab.simulate.replicated import Loss, ReplicatedSimulation
from hpu_duo.lab.simulate.report import ReplicaFigures
from hpu_duo.lab.simulate.run_log import RunLog
from hpu_duo.lab.simulate.server import SimulatedServer
from hpu_duo.lab.simulate.sessions import SessionArrivals
from hpu_duo.lab.traces import Session


@dataclass(frozen=True)
class Fleet:
    """Replicas of one server behind a router.

    Attributes:
        num_replicas, router: how many, and the router's name with options.
        losses, tells_hits: see ``ReplicatedSimulation``.
    """

    num_replicas: int
    router: str
    losses: tuple[Loss, ...] = ()
    tells_hits: bool = True

    def run(
        self,
        server: SimulatedServer,
        policy: str,
        sessions: Sequence[Session],
        *,
        seed: int = 0,
        forecast: Forecast | None = None,
        until_s: float = float("inf"),
    ) -> tuple[RunLog, ReplicaFigures]:
        """Serve sessions with replicas of a server, each under the policy; see ``SimulatedServer.run``.

        Raises:
            ValueError: no such router or policy, or a request that does not fit.
            GraphMissError: no bucket holds a step.
        """
        arrivals = SessionArrivals(sessions, server.limits.max_model_len, seed, forecast)
        simulation = ReplicatedSimulation(
            lambda: server.engine(policy),
            self.num_replicas,
            make_router(self.router),
            arrivals,
            self.losses,
            tells_hits=self.tells_hits,
        )
        log, num_lost = RunLog(arrivals.came, server.cost), 0
        for step in simulation.steps(until_s):
            for request in simulation.lost[num_lost:]:
                log.lose(request)
            num_lost = len(simulation.lost)
            log.take(step)
        for request in simulation.lost[num_lost:]:
            log.lose(request)
        log.close()
        expected = simulation.num_expected_tokens / max(1, simulation.num_sent_tokens)
        return log, ReplicaFigures(self.router, self.num_replicas, expected, len(simulation.lost))
