"""The runtime of a device, as the engine needs it, those of CPU and CUDA, and those of plug-ins."""

from __future__ import annotations

import importlib
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
from torch import nn

from hpu_duo.device.streams import CudaCopyStream, pin_for_cuda

if TYPE_CHECKING:
    from graphs import CaptureBackend


_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class HostMemory:
    """Bytes that this process may have in all, and bytes that it can have now."""

    total: int
    free: int


def resident_bytes() -> int:
    """Host memory of this process, as reported by the system; its peak if only that is available."""
    if _STATM.is_file():
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Memory of the machine, caches that can be freed included, within the limits of our control groups.

    Args:
        root: directory that ``proc`` and ``sys`` lie in.
    """
    limits = [_machine(root / "proc/meminfo"), *_groups(root)]
    return HostMemory(min(each.total for each in limits), max(0, min(each.free for each in limits)))


@dataclass(frozen=True)
class _Controller:
    """The files of one version of the memory controller; ``cache`` is the entry that is given back first."""

    mount: str
    limit: str
    usage: str
    cache: str


_V1 = _Controller(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_V2 = _Controller("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def _machine(meminfo: Path) -> HostMemory:
    if meminfo.is_file():
        entries = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return HostMemory(*(int(entries[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")))
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    # macOS does not report free memory.
    is_told = "SC_AVPHYS_PAGES" in os.sysconf_names
    return HostMemory(total, os.sysconf("SC_AVPHYS_PAGES") * page if is_told else total)


def _groups(root: Path) -> Iterator[HostMemory]:
    """Limits of the groups that this process is in, and of their parents: all of them apply."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        controller = _V2 if number == "0" else _V1
        mount = root / controller.mount
        group = mount / path.lstrip("/")
        # Inside of a container the path may be the host's, and the mount the container's own group.
        for directory in (group, *group.parents):
            if (limit := _limit(directory, controller)) is not None:
                yield limit
            if directory == mount:
                break


def _limit(group: Path, controller: _Controller) -> HostMemory | None:
    """The limit of one group; None if it has none."""
    try:
        limit = (group / controller.limit).read_text().strip()
        usage = int((group / controller.usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    return HostMemory(int(limit), int(limit) - usage + int(stat.get(controller.cache, 0)))


class DeviceRuntime(Protocol):
    """The operations and properties in which devices differ."""

    @property
    def name(self) -> str:
        """The name of the device in settings."""
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
        """Register the device's backend with ``torch.distributed``; returns its name."""
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
        """Device memory of this process, reserves of its allocator included."""
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
    """A runtime that counts compilations and fallbacks."""

    @property
    def counted_by(self) -> str:
        """Name of the counter in findings."""
        ...

    def metrics(self) -> DeviceMetrics:
        """The counts now."""
        ...


def no_compile_only(name: str) -> AbstractContextManager[None]:
    """Raise ValueError for compile-only mode, for a device without it.

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
        """Memory that the caching allocator has reserved from the driver, pools of graphs included."""
        return torch.cuda.memory_reserved(self._device)

    def compile_only(self) -> AbstractContextManager[None]:
        """Raise ValueError: there is no such mode."""
        return no_compile_only("cuda")

    def place(self, module: nn.Module) -> None:
        """Move the module."""
        module.to(self._device)

    def copy_stream(self) -> CudaCopyStream:
        """Return a new stream."""
        return CudaCopyStream(self._device)

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Register memory of the host with CUDA."""
        return pin_for_cuda(memory)


PLUGGED = {"hpu-sim": "hpu_duo.lab.sim.device"}
"""Modules that are a ``PluggedDevice``, by the name of the device."""


class PluggedDevice(Protocol):
    """A device that replaces another one, for the rest of the process once it is acquired."""

    def problem(self) -> str | None:
        """Return why it cannot be acquired here; None if it can."""
        ...

    def take(self) -> torch.device:
        """Acquire the device for this process.

        Raises:
            ValueError: see ``problem``.
        """
        ...

    def runtime(self) -> DeviceRuntime | None:
        """The runtime of the device; None before this process has acquired it."""
        ...


def plugged(name: str) -> PluggedDevice:
    """The device of a name in ``PLUGGED``."""
    return cast(PluggedDevice, importlib.import_module(PLUGGED[name]))


def taken_runtime() -> DeviceRuntime | None:
    """The runtime of the acquired plug-in device, or None; imports nothing."""
    modules = (sys.modules.get(path) for path in PLUGGED.values())
    runtimes = (cast(PluggedDevice, module).runtime() for module in modules if module is not None)
    return next((runtime for runtime in runtimes if runtime is not None), None)
