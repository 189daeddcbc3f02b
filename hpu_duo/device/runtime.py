"""What the engine asks of a device, and the answers of CPU and CUDA."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import nn

from hpu_duo.device.host_memory import host_memory, resident_bytes

if TYPE_CHECKING:
    from graphs import CaptureBackend


class DeviceRuntime(Protocol):
    """The few things that devices do differently."""

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

        Then steps are padded to a table, sampling takes few routes, and models are looked over on CPU.
        """
        ...

    def version(self) -> str:
        """The hardware or software, as far as the time that a step takes depends on it."""
        ...

    def own_backend(self) -> CaptureBackend | None:
        """The device's own way of capturing steps, in place of those with a name; None without one."""
        ...

    def collectives(self) -> str:
        """What ``torch.distributed`` calls the device's backend, which it knows from now on."""
        ...

    def step(self) -> AbstractContextManager[None]:
        """Around everything that one engine step does on the device."""
        ...

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        ...

    def free_bytes(self) -> int:
        """Device memory that nobody uses."""
        ...

    def total_bytes(self) -> int:
        """Device memory that there is."""
        ...

    def used_bytes(self) -> int:
        """Device memory that this process holds, what its allocator keeps for itself included."""
        ...

    def compile_only(self) -> AbstractContextManager[None]:
        """What is captured inside is built and not launched: results are garbage, stores keep what they hold.

        Raises:
            ValueError: the device has no such mode.
        """
        ...

    def place(self, module: nn.Module) -> None:
        """Move a module's parameters and buffers to the device, in place."""
        ...


@dataclass(frozen=True)
class DeviceMetrics:
    """What a device has counted since the process began.

    Attributes:
        compiled: how often each graph was compiled, by the name that the device has for it.
        fallbacks: how often each operator ran on the CPU of the host.
    """

    compiled: Mapping[str, int] = field(default_factory=dict)
    fallbacks: Mapping[str, int] = field(default_factory=dict)


@runtime_checkable
class Metered(Protocol):
    """A runtime whose device counts compilations and fallbacks."""

    @property
    def counted_by(self) -> str:
        """Who counts, as findings call it."""
        ...

    def metrics(self) -> DeviceMetrics:
        """The counts now."""
        ...


def no_compile_only(name: str) -> AbstractContextManager[None]:
    """The answer of a device that launches whatever it builds.

    Raises:
        ValueError: always; the message names the device.
    """
    raise ValueError(f"building graphs without launching them is a mode of hpu devices, got {name}")


class CpuRuntime:
    """Nothing to launch, nothing to wait for."""

    name = "cpu"
    is_lazy = False
    compiles_operators = False

    def version(self) -> str:
        """The machine, and the instructions that torch uses of it."""
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"

    def own_backend(self) -> None:
        """There is none."""

    def collectives(self) -> str:
        """Gloo is a part of torch."""
        return "gloo"

    def step(self) -> AbstractContextManager[None]:
        """Nothing happens around a step."""
        return nullcontext()

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def free_bytes(self) -> int:
        """Memory that this process can have now, what caches would give back included."""
        return host_memory().free

    def total_bytes(self) -> int:
        """Memory of the machine, or of the control group that this process is limited to."""
        return host_memory().total

    def used_bytes(self) -> int:
        """Resident memory of the process."""
        return resident_bytes()

    def compile_only(self) -> AbstractContextManager[None]:
        """There is no such mode."""
        return no_compile_only("cpu")

    def place(self, module: nn.Module) -> None:
        """Move the module to host memory."""
        module.to("cpu")


class CudaRuntime:
    """torch's own functions.

    Args:
        device: which CUDA device.
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
        """There is none."""

    def collectives(self) -> str:
        """NCCL is a part of torch's builds for CUDA."""
        return "nccl"

    def step(self) -> AbstractContextManager[None]:
        """Nothing happens around a step."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self._device)

    def free_bytes(self) -> int:
        """What the driver calls free."""
        return torch.cuda.mem_get_info(self._device)[0]

    def total_bytes(self) -> int:
        """What the driver calls total."""
        return torch.cuda.mem_get_info(self._device)[1]

    def used_bytes(self) -> int:
        """What the caching allocator has taken from the driver, the pools of graphs included."""
        return torch.cuda.memory_reserved(self._device)

    def compile_only(self) -> AbstractContextManager[None]:
        """There is no such mode."""
        return no_compile_only("cuda")

    def place(self, module: nn.Module) -> None:
        """Move the module."""
        module.to(self._device)
