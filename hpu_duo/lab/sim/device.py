"""The simulated HPU as a ``PluggedDevice`` of ``hpu_duo.device``."""

from __future__ import annotations

import torch

from hpu_duo.lab.sim.installation import install, installed, problem
from hpu_duo.lab.sim.runtime import SimRuntime
from hpu_duo.lab.sim.tensor import HPU

__all__ = ["problem", "runtime", "take"]


def take() -> torch.device:
    """Install the simulated device, once.

    Raises:
        ValueError: see ``problem``.
    """
    install()
    return HPU


def runtime() -> SimRuntime | None:
    """Return the runtime of the simulated device; None in a process that has not installed it."""
    device = installed()
    return None if device is None else SimRuntime(device)
