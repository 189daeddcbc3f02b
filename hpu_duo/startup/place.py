"""The place where steps run: a device, its runtime, and what captures steps there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphs import CaptureBackend, make_backend
from graphs.backends import CHOSEN_LATER, chosen_name
from graphs.backends.replay import ReplayBackend
from hpu_duo.config.engine import EngineConfig
from hpu_duo.device import DeviceRuntime, own_device, resolve_device, runtime_for
from hpu_duo.modeling.row_fusion import arrange


@dataclass(frozen=True)
class Place:
    """The device of an engine, taken.

    Attributes:
        device: where steps run.
        runtime: of the device.
        backend: captures steps there.
    """

    device: torch.device
    runtime: DeviceRuntime
    backend: CaptureBackend

    @classmethod
    def of(cls, config: EngineConfig, rank: int = 0) -> Place:
        """Take the device that a configuration asks for.

        Args:
            rank: of this process, if several share a model.

        Raises:
            ValueError: the device is not usable, or the capture backend cannot capture steps on it; nothing
                falls back to another one.
        """
        lazy = _lazy_mode(config)
        device = resolve_device(config.model.device, lazy)
        if config.parallel.tensor_parallel_size > 1:
            device = own_device(device, rank)
        runtime = runtime_for(device, lazy)
        return cls(device, runtime, _backend(config, device, runtime))

    @property
    def fuses_rows(self) -> bool:
        """Whether steps will run fused elementwise programs, if their interpreter can be built."""
        return isinstance(self.backend, ReplayBackend) and self.backend.arrange is arrange

    @property
    def first_device(self) -> torch.device:
        """The device to probe a model on: the host, if the device would compile every operator."""
        return torch.device("cpu") if self.runtime.compiles_operators else self.device


def _lazy_mode(config: EngineConfig) -> bool | None:
    """Return the mode of HPU that the capture backend needs; None if the user's environment decides."""
    backend = config.graph.backend
    name = backend if isinstance(backend, str) else backend.name
    return {"hpu-graph": True, "hpu-compile": False}.get(name)


def _backend(config: EngineConfig, device: torch.device, runtime: DeviceRuntime) -> CaptureBackend:
    chosen = config.graph.backend
    own = runtime.own_backend()
    if own is not None and isinstance(chosen, str):
        if chosen not in ("eager", *CHOSEN_LATER):
            raise ValueError(f"device {runtime.name!r} captures steps in its own way, got graphs={chosen!r}")
        return own
    if isinstance(chosen, str):
        chosen = _make_backend(chosen_name(chosen, device.type, runtime.is_lazy))
    problem = chosen.problem(device)
    if problem is not None:
        raise ValueError(f"graphs={chosen.name!r} cannot be used: {problem}")
    return chosen


def _make_backend(name: str) -> CaptureBackend:
    return ReplayBackend(arrange) if name == "replay" else make_backend(name)
