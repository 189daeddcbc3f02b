"""The runtime of the simulated device."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from hpu_duo.device import DeviceMetrics
from hpu_duo.device.placing import replace_tensors
from hpu_duo.device.runtime import host_memory, resident_bytes
from hpu_duo.lab.rules import Rule
from hpu_duo.lab.sim.capture import SimBackend
from hpu_duo.lab.sim.simulated import SimulatedHpu
from hpu_duo.lab.sim.streams import SimCopyStream


class SimRuntime:
    """See ``hpu_duo.device.DeviceRuntime``. Memory is that of the host: nothing is simulated there."""

    name = "hpu-sim"
    counted_by = "the simulated HPU"
    is_lazy = False
    compiles_operators = True

    def __init__(self, device: SimulatedHpu) -> None:
        self._device = device
        self._model_dtype: torch.dtype | None = None

    def version(self) -> str:
        """A text that says that there is no hardware."""
        return "simulated"

    def own_backend(self) -> SimBackend:
        """Return a backend that records steps, and compares every later run."""
        return SimBackend(self._device)

    def metrics(self) -> DeviceMetrics:
        """Graphs by bucket, and operators that ran outside of graphs for the first time."""
        journal = self._device.journal
        return DeviceMetrics({**journal.graphs, "operators outside of graphs": len(journal.recipes)})

    def collectives(self) -> str:
        """Return "gloo": the data are in host memory."""
        return "gloo"

    def step(self) -> AbstractContextManager[None]:
        """Return a context in which the counts of one step are taken."""
        return self._device.step(self._model_dtype)

    def results(self) -> AbstractContextManager[None]:
        """Return a context in which counts are those of the last step."""
        return self._device.step(self._model_dtype, goes_on=True)

    def copy_stream(self) -> SimCopyStream:
        """Return a queue of copies that end later."""
        return SimCopyStream(self._device.copies_aside)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return zeros: all memory of the host is the same here."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        """Do nothing: operators have ended when they return."""

    def free_bytes(self) -> int:
        """Free host memory."""
        return host_memory().free

    def total_bytes(self) -> int:
        """All host memory."""
        return host_memory().total

    def used_bytes(self) -> int:
        """Resident host memory."""
        return resident_bytes()

    def compile_only(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is launched, so that results are garbage."""
        return self._device.compile_only()

    @torch.no_grad()
    def place(self, module: nn.Module) -> None:
        """Replace parameters and buffers by device tensors; shared ones stay shared.

        ``module.to`` would write into the old parameters and thereby lose the kind of tensor. 64-bit
        buffers are let through: a device narrows them once, and a step that reads one breaks the rule.
        """

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "hpu":
                return tensor
            placed = self._device.upload(tensor.detach())
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                placed.weight_dtype = tensor.dtype
            return placed

        self._model_dtype = next((each.dtype for each in module.parameters()), None)

        with self._device.allow(Rule.WIDE_DTYPE):
            replace_tensors(module, move)
