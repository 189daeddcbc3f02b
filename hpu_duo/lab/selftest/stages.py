"""The stages in order. A new one is a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hpu_duo.lab.selftest.capture import capture
from hpu_duo.lab.selftest.exchange import exchange
from hpu_duo.lab.selftest.finding import Notes
from hpu_duo.lab.selftest.generation import compare_generation
from hpu_duo.lab.selftest.kernels import compare_kernels
from hpu_duo.lab.selftest.machine import describe_machine
from hpu_duo.lab.selftest.operators import compare_operators
from hpu_duo.lab.selftest.subject import Subject
from hpu_duo.lab.selftest.timing import time_steps


@dataclass(frozen=True)
class Stage:
    """One part of the test.

    Attributes:
        name: on the command line.
        title: for reports.
        run: the function; an exception says that it could not be finished.
        is_lazy: the mode of an HPU that it needs; None = any.
        holds_device: whether it takes the device, which on a Gaudi no other process can have then. A stage
            that leaves devices to processes of its own runs where nobody has taken one.
    """

    name: str
    title: str
    run: Callable[[Subject, Notes], None]
    is_lazy: bool | None = None
    holds_device: bool = True


_CAPTURED_BY = {
    "hpu": ("hpu-compile", "hpu-graph"),
    "cuda": ("cuda",),
    "cpu": ("replay", "compile"),
}
"""Capture backends by device; other devices have their own."""


def stages_of(device: str) -> tuple[Stage, ...]:
    """Return all stages for a device.

    Args:
        device: type of device, such as "hpu" or "hpu-sim".
    """
    return (
        Stage("machine", "Environment and versions", describe_machine),
        Stage("operators", "Operators against the CPU", compare_operators),
        Stage("kernels", "Kernel implementations against the reference", compare_kernels),
        *(
            Stage(
                f"capture-{name}" if name != "auto" else "capture",
                f"Capture, replay and recompilation{'' if name == 'auto' else ' with ' + name}",
                partial(capture, backend=name),
                {"hpu-graph": True, "hpu-compile": False}.get(name),
            )
            for name in _CAPTURED_BY.get(device, ("auto",))
        ),
        Stage("generation", "A short generation against the CPU", compare_generation),
        Stage("timing", "Seconds of steps by bucket", time_steps),
        Stage("exchange", "Exchange between cards", exchange, holds_device=False),
    )
