"""Devices: the usable ones, their names, and their runtimes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import torch

from hpu_duo.device.processes import Member, Refused, WorkerError, run_processes
from hpu_duo.device.runtime import (
    PLUGGED,
    CpuRuntime,
    CudaRuntime,
    DeviceMetrics,
    DeviceRuntime,
    Metered,
    PluggedDevice,
    plugged,
    taken_runtime,
)

__all__ = [
    "NAMES",
    "PLUGGED",
    "CpuRuntime",
    "CudaRuntime",
    "DeviceMetrics",
    "DeviceRuntime",
    "Member",
    "Metered",
    "PluggedDevice",
    "Refused",
    "WorkerError",
    "cuda_problem",
    "hpu_problem",
    "own_device",
    "problem",
    "process_environments",
    "resolve_device",
    "run_processes",
    "runtime_for",
    "usable_name",
]

NAMES = ("cpu", "cuda", "hpu", *PLUGGED)


def hpu_problem(lazy: bool | None = None) -> str | None:
    """Why HPU cannot be used, or None when it can.

    The mode is chosen here, since looking for a device imports the vendor's packages; see
    ``hpu_duo.device.habana_environment``. Designed from public sources; no Gaudi has run this.
    """
    if importlib.util.find_spec("habana_frameworks") is None:
        return "the package habana_frameworks is not installed"
    from hpu_duo.device import habana

    return None if habana.is_available(lazy) else "habana_frameworks is installed, but finds no device"


def cuda_problem() -> str | None:
    """Why CUDA cannot be used, or None when it can."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


def problem(name: str, lazy: bool | None = None) -> str | None:
    """Why a device cannot be used, or None when it can; ``lazy`` as in ``hpu_problem``."""
    match name:
        case "cpu":
            return None
        case "cuda":
            return cuda_problem()
        case "hpu":
            return hpu_problem(lazy)
        case _:
            return plugged(name).problem()


def usable_name(name: str | torch.device, lazy: bool | None = None) -> str:
    """Return the name of a device that is usable here; "auto" becomes the first such of HPU, CUDA and CPU.

    Acquires no device, so a process that only starts others can call it.

    Args:
        lazy: as in ``resolve_device``, which raises the same errors.
    """
    text = str(name)
    if text == "auto":
        text = next(candidate for candidate in ("hpu", "cuda", "cpu") if problem(candidate, lazy) is None)
    kind, colon, index = text.partition(":")
    if colon and not (index.isascii() and index.isdigit()):
        raise ValueError(f"expected a device such as 'cpu' or 'cuda:0', got {text!r}")
    if kind not in NAMES:
        raise ValueError(f"expected device 'auto' or one of {', '.join(NAMES)}, got {text!r}")
    reason = problem(kind, lazy)
    if reason is not None:
        raise ValueError(f"device {text!r} is not available: {reason}")
    return text


def resolve_device(name: str | torch.device, lazy: bool | None = None) -> torch.device:
    """Return the device for a name; "auto" is the first of HPU, CUDA and CPU that is usable.

    "hpu-sim" is a simulated ``hpu:0``, see ``hpu_duo.lab.sim``.

    Args:
        lazy: the mode that HPU is used in, if it is; None leaves it to the user's environment.

    Raises:
        ValueError: an unknown name, a device that is not usable here, or HPU in the other mode: nothing
            falls back.
    """
    text = usable_name(name, lazy)
    kind = text.partition(":")[0]
    return plugged(kind).take() if kind in PLUGGED else torch.device(text)


def process_environments(name: str, num_processes: int) -> list[Mapping[str, str]]:
    """Variables for each of several processes of this machine that run on a device; see ``run_processes``.

    Args:
        name: as ``usable_name`` returns it. CUDA devices with an index are shared by all processes.

    Raises:
        ValueError: fewer than one process, or more than there are devices for.
    """
    kind, _, index = name.partition(":")
    if num_processes < 1:
        raise ValueError(f"expected at least 1 process, got {num_processes}")
    if kind == "hpu":
        from hpu_duo.device import habana
        from hpu_duo.device.habana_environment import card_environment

        _check_enough(kind, habana.num_devices(), num_processes)
        return [card_environment(rank, num_processes) for rank in range(num_processes)]
    if kind == "cuda" and not index:
        _check_enough(kind, torch.cuda.device_count(), num_processes)
    return [{} for _ in range(num_processes)]


def own_device(device: torch.device, local_rank: int) -> torch.device:
    """The device of one of several processes of a machine.

    CUDA devices are used in order; an HPU process has one device, with the card chosen by the environment.

    Args:
        device: as ``resolve_device`` returned it in this process.
    """
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", local_rank)
    return device


def _check_enough(kind: str, num_devices: int, num_processes: int) -> None:
    if num_processes > num_devices:
        raise ValueError(
            f"expected at most {num_devices} processes, one for each {kind} device, got {num_processes}"
        )


def runtime_for(device: torch.device, lazy: bool | None = None) -> DeviceRuntime:
    """Return the runtime of a device of ``resolve_device``, in the mode chosen there."""
    match device.type:
        case "cpu":
            return CpuRuntime()
        case "cuda":
            return CudaRuntime(device)
        case _:
            runtime = taken_runtime()
            if runtime is not None:
                return runtime
            from hpu_duo.device.habana import HabanaRuntime

            return HabanaRuntime(lazy)
