"""A virtual clock: when requests come, and when an engine's steps start and end."""

from __future__ import annotations

from collections.abc import Iterator

from hpu_duo.simulate.arrivals import Arrivals
from hpu_duo.simulate.engine import SimulatedEngine, SimulatedStep


class Simulation:
    """An engine on a virtual clock.

    Steps follow each other without a gap while there is a request. Requests that come during a step are
    planned with the next one. The same arrivals and an equal engine give the same steps.

    Args:
        engine: serves the requests.
        arrivals: the requests.

    Attributes:
        now: time on the clock, from 0 on.
    """

    def __init__(self, engine: SimulatedEngine, arrivals: Arrivals) -> None:
        self.engine, self.now = engine, 0.0
        self._arrivals = arrivals

    def steps(self, until: float = float("inf")) -> Iterator[SimulatedStep]:
        """Serve steps that begin before ``until``, as long as there are requests or will be.

        Raises:
            ValueError: the pool cannot hold a request, a bucket takes no time.
            GraphMissError: no bucket holds a step.
        """
        while self._wait(until):
            step = self.engine.step(self.now)
            self.now = step.end
            for done in step.committed:
                if done.finish_reason is not None:
                    self._arrivals.ended(done.request, self.now)
            yield step

    def _wait(self, until: float) -> bool:
        """Add the requests that have come, or wait for the next one; returns whether a step is to run."""
        self._add_due()
        while not self.engine.has_unfinished:
            coming = self._arrivals.next_time()
            if coming is None or coming >= until:
                return False
            self.now = max(self.now, coming)
            self._add_due()
        return self.now < until

    def _add_due(self) -> None:
        for request in self._arrivals.due(self.now):
            self.engine.add(request)
