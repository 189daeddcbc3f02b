"""A server without a device: the real scheduler, served by a cost function on a virtual clock."""

from hpu_duo.simulate.arrivals import Arrivals, Trace
from hpu_duo.simulate.engine import SimulatedEngine, SimulatedStep
from hpu_duo.simulate.planning import plan_buckets
from hpu_duo.simulate.simulation import Simulation
from hpu_duo.simulate.users import Users, prior

__all__ = [
    "Arrivals",
    "SimulatedEngine",
    "SimulatedStep",
    "Simulation",
    "Trace",
    "Users",
    "plan_buckets",
    "prior",
]
