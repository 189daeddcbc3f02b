"""The runtime of a device, as the engine needs it, those of CPU and CUDA, and those of plug-ins."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
from torch import nn

from hpu_duo.device.host_memory import host_memory, resident_bytes

if TYPE_CHECKING:
    from graphs import CaptureBackend


class DeviceRuntime(Protocol):
    """The operations and properties in which devices differ."""

    @property
    def name(self) -> str:
        """The name that a user asks for the device by."""
        ...

    @property
    def is_lazy(self) -> bool:
        """Whether operators are collected, and launched at the end of a step."""
        ...

    @property
    def compiles_operators(self) -> bool:
        """Whether each operator of a new shape is compiled, also outside of captured steps.

        Then steps are padded to a table, sampling takes few routes, and models are probed on CPU.
        """
        ...

    def version(self) -> str:
        """Hardware and software that the duration of a step depends on."""
        ...

    def own_backend(self) -> CaptureBackend | None:
        """The device's own capture backend, which replaces the named ones; None without one."""
        ...

    def collectives(self) -> str:
        """Make the device's backend known to ``torch.distributed``; returns its name there."""
        ...

    def step(self) -> AbstractContextManager[None]:
        """Context around all work that one engine step puts on the device."""
        ...

    def results(self) -> AbstractContextManager[None]:
        """Context around the reads of the last step's results."""
        ...

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        ...

    def free_bytes(self) -> int:
        """Free device memory."""
        ...

    def total_bytes(self) -> int:
        """Device memory in all."""
        ...

    def used_bytes(self) -> int:
        """Device memory that this process holds, its allocator's reserves included."""
        ...

    def compile_only(self) -> AbstractContextManager[None]:
        """Build captured graphs without launching them: results are garbage, stores stay as they are.

        Raises:
            ValueError: the device has no such mode.
        """
        ...

    def place(self, module: nn.Module) -> None:
        """Move a module's parameters and buffers to the device, in place."""
        ...


@dataclass(frozen=True)
class DeviceMetrics:
    """Counts of a device since the process began.

    Attributes:
        compiled: compilations of each graph, by its name on the device.
        fallbacks: runs of each operator on the CPU of the host.
    """

    compiled: Mapping[str, int] = field(default_factory=dict)
    fallbacks: Mapping[str, int] = field(default_factory=dict)


@runtime_checkable
class Metered(Protocol):
    """A runtime whose device counts compilations and fallbacks."""

    @property
    def counted_by(self) -> str:
        """Name of the counter in findings."""
        ...

    def metrics(self) -> DeviceMetrics:
        """The counts now."""
        ...


def no_compile_only(name: str) -> AbstractContextManager[None]:
    """Refuse compile-only mode, for a device that launches all it builds.

    Raises:
        ValueError: always; the message names the device.
    """
    raise ValueError(f"building graphs without launching them is a mode of hpu devices, got {name}")


class CpuRuntime:
    """Runtime of the CPU: there is nothing to launch and nothing to wait for."""

    name = "cpu"
    is_lazy = False
    compiles_operators = False

    def version(self) -> str:
        """The machine, and the instructions that torch uses of it."""
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"

    def own_backend(self) -> None:
        """Return None: there is none."""

    def collectives(self) -> str:
        """Return "gloo", which is a part of torch."""
        return "gloo"

    def step(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def results(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def synchronize(self) -> None:
        """Do nothing: operators have ended when they return."""

    def free_bytes(self) -> int:
        """Memory that this process can have now, caches that can be freed included."""
        return host_memory().free

    def total_bytes(self) -> int:
        """Memory of the machine, or of the control group that this process is limited to."""
        return host_memory().total

    def used_bytes(self) -> int:
        """Resident memory of the process."""
        return resident_bytes()

    def compile_only(self) -> AbstractContextManager[None]:
        """Raise ValueError: there is no such mode."""
        return no_compile_only("cpu")

    def place(self, module: nn.Module) -> None:
        """Move the module to host memory."""
        module.to("cpu")


class CudaRuntime:
    """Runtime of a CUDA device, by torch's own functions.

    Args:
        device: the CUDA device.
    """

    name = "cuda"
    is_lazy = False
    compiles_operators = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def version(self) -> str:
        """The card, and the CUDA that torch was built for."""
        return f"{torch.cuda.get_device_name(self._device)}, CUDA {torch.version.cuda}"

    def own_backend(self) -> None:
        """Return None: there is none."""

    def collectives(self) -> str:
        """Return "nccl", which is a part of torch's builds for CUDA."""
        return "nccl"

    def step(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def results(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self._device)

    def free_bytes(self) -> int:
        """Free memory, as the driver reports it."""
        return torch.cuda.mem_get_info(self._device)[0]

    def total_bytes(self) -> int:
        """Total memory, as the driver reports it."""
        return torch.cuda.mem_get_info(self._device)[1]

    def used_bytes(self) -> int:
        """Memory that the caching allocator has taken from the driver, the pools of graphs included."""
        return torch.cuda.memory_reserved(self._device)

    def compile_only(self) -> AbstractContextManager[None]:
        """Raise ValueError: there is no such mode."""
        return no_compile_only("cuda")

    def place(self, module: nn.Module) -> None:
        """Move the module."""
        module.to(self._device)


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
