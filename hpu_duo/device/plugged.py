"""Devices that plug in: modules that are imported when their device is asked for by name."""

from __future__ import annotations

import importlib
import sys
from typing import Protocol, cast

import torch

from hpu_duo.device.runtime import DeviceRuntime

PLUGGED = {"hpu-sim": "hpu_duo.lab.sim.device"}
"""Modules that are a ``PluggedDevice``, by the name of the device."""


class PluggedDevice(Protocol):
    """A device in place of another one, for the rest of the process once it has been taken."""

    def problem(self) -> str | None:
        """Why it cannot be taken here, or None when it can."""
        ...

    def take(self) -> torch.device:
        """Give this process the device.

        Raises:
            ValueError: see ``problem``.
        """
        ...

    def runtime(self) -> DeviceRuntime | None:
        """The runtime of the device; None before this process has taken it."""
        ...


def plugged(name: str) -> PluggedDevice:
    """The device of a name in ``PLUGGED``."""
    return cast(PluggedDevice, importlib.import_module(PLUGGED[name]))


def taken_runtime() -> DeviceRuntime | None:
    """The runtime of the plugged device that this process has taken, or None; imports nothing."""
    modules = (sys.modules.get(path) for path in PLUGGED.values())
    runtimes = (cast(PluggedDevice, module).runtime() for module in modules if module is not None)
    return next((runtime for runtime in runtimes if runtime is not None), None)
