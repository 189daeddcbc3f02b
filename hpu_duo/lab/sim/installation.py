"""Put the simulated device into this process, once."""

from __future__ import annotations

import importlib.util
import types
from contextlib import AbstractContextManager

import torch

from hpu_duo.lab.rules import Rule
from hpu_duo.lab.sim import fused
from hpu_duo.lab.sim.guard import load_guard
from hpu_duo.lab.sim.journal import Journal, Watch
from hpu_duo.lab.sim.simulated import SimulatedHpu
from hpu_duo.lab.sim.tensor import connect
from kernels_ref.native import COMPILERS, compiler

_FACTORIES = (
    "empty.memory_format",
    "empty_strided",
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "eye.m",
    "full",
    "linspace",
    "ones",
    "scalar_tensor",
    "zeros",
)
_installed: list[SimulatedHpu] = []
# Kernels are registered for as long as their library lives.
_libraries: list[torch.library.Library] = []


def problem() -> str | None:
    """Why the simulated device cannot be used here, or None when it can."""
    if _installed:
        return None
    if importlib.util.find_spec("habana_frameworks") is not None:
        return "habana_frameworks is installed, and a process has either a real HPU or a simulated one"
    if compiler() is None:
        return f"it needs a C++ compiler, and none of {', '.join(COMPILERS)} is on the path"
    return None


def installed() -> SimulatedHpu | None:
    """The simulated device of this process, or None."""
    return _installed[0] if _installed else None


def install() -> SimulatedHpu:
    """Give this process a simulated ``hpu:0``; later calls return the same one.

    It stays until the process ends: torch has no way to forget a kind of device.

    Raises:
        ValueError: see ``problem``.
    """
    if _installed:
        return _installed[0]
    reason = problem()
    if reason is not None:
        raise ValueError(f"the simulated HPU cannot be used: {reason}")
    load_guard()
    fused.register()
    device = SimulatedHpu(Journal())
    connect(device.run, _device_module())
    library = torch.library.Library("aten", "IMPL")
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, device.make(func), "HPU")
    library.impl("_copy_from", device.copy_from, "HPU")
    _libraries.append(library)
    _installed.append(device)
    return device


def watch() -> AbstractContextManager[Watch]:
    """Count what happens on the simulated device inside the context.

    Raises:
        ValueError: there is no simulated device, and none can be made.
    """
    return install().watch()


def allow(*rules: Rule) -> AbstractContextManager[None]:
    """Let rules be broken inside the context; watches count how often.

    Raises:
        ValueError: there is no simulated device, and none can be made.
    """
    return install().allow(*rules)


def _device_module() -> types.ModuleType:
    """Make ``torch.hpu``, with the functions that torch itself calls."""
    module = types.ModuleType("torch.hpu", "The simulated HPU.")
    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "_is_in_bad_fork": False,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
        "_lazy_init": None,
    }
    for name, answer in answers.items():
        setattr(module, name, lambda *_, answer=answer: answer)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    module.get_device_name = lambda *_: fused.device_name()  # type: ignore[attr-defined]
    # torch.compile asks every device for them, for code of other devices too.
    module.Stream, module.Event = torch.Stream, torch.Event  # type: ignore[attr-defined]
    return module
