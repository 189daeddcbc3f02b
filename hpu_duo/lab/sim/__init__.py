"""A simulated HPU: the real engine on stock torch, with tensors that report ``hpu:0``.

``HPUDuoModel.from_pretrained(path, device="hpu-sim")`` is all that most callers need; ``watch`` counts
what steps do, and ``allow`` lets a rule be broken. Numbers are those of the CPU. Steps that do what an
HPU does badly, wrongly or not at all raise ``HpuRuleViolation``.

It proves that rules are kept, and numerics. It does not prove that Synapse compiles anything, nor speed, nor
device memory.
"""

from hpu_duo.lab.rules import HpuRuleViolation, Rule
from hpu_duo.lab.sim.capture import SimBackend
from hpu_duo.lab.sim.installation import allow, install, installed, problem, watch
from hpu_duo.lab.sim.journal import Watch
from hpu_duo.lab.sim.report import NOT_PROVEN, SimReport, StepTraffic
from hpu_duo.lab.sim.runtime import SimRuntime
from hpu_duo.lab.sim.simulated import SimulatedHpu
from hpu_duo.lab.sim.tensor import SimTensor

__all__ = [
    "NOT_PROVEN",
    "HpuRuleViolation",
    "Rule",
    "SimBackend",
    "SimReport",
    "SimRuntime",
    "SimTensor",
    "SimulatedHpu",
    "StepTraffic",
    "Watch",
    "allow",
    "install",
    "installed",
    "problem",
    "watch",
]
