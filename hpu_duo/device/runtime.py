"""What the engine asks of a device, and the answers of CPU and CUDA."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from hpu_duo.sim.host_memory import host_memory, resident_bytes


class DeviceRuntime(Protocol):
    """The few things that devices do differently."""

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


def no_compile_only(name: str) -> AbstractContextManager[None]:
    """The answer of a device that launches whatever it builds.

    Raises:
        ValueError: always; the message names the device.
    """
    raise ValueError(f"building graphs without launching them is a mode of hpu devices, got {name}")


class CpuRuntime:
    """Nothing to launch, nothing to wait for."""

    is_lazy = False
    compiles_operators = False

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

    is_lazy = False
    compiles_operators = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

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
