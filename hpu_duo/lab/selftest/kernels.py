"""Every kernel implementation that runs on the device, against the reference on the CPU."""

from __future__ import annotations

from hpu_duo.lab.selftest.finding import Notes
from hpu_duo.lab.selftest.fused import try_fused
from hpu_duo.lab.selftest.steps import record_steps, run_uncaptured, worst_by_phase
from hpu_duo.lab.selftest.subject import Subject

TOLERANCES = {"float32": 1e-3, "bfloat16": 6e-2}
"""Largest relative error of logits by dtype: a wrong mask, scale or index is off by far more."""

_IMPLEMENTATIONS = {
    "cpu": ("reference", "sdpa"),
    "cuda": ("reference", "triton"),
    "hpu": ("reference", "hpu"),
    "hpu-sim": ("reference", "hpu"),
}


def compare_kernels(subject: Subject, notes: Notes) -> None:
    """Carry out the same steps with every implementation and dtype, and compare logits by phase.

    Steps run uncaptured: what is at fault here is a kernel or an operator and no graph.
    """
    steps = record_steps(subject)
    names: tuple[str, ...] = _IMPLEMENTATIONS[subject.kind]
    if "hpu" in names and not try_fused(subject, notes):
        names = tuple(name for name in names if name != "hpu")
    for name in names:
        for dtype, tolerance in TOLERANCES.items():
            notes.begin(f"{name} in {dtype}")
            try:
                model = steps.load(subject, attention=name, dtype=dtype, graphs="eager")
            except ValueError as error:
                notes.check(f"{name}, {dtype}", False, f"refused: {error}")
                continue
            for phase, off in worst_by_phase(model, steps, run_uncaptured).items():
                notes.check(
                    f"{name}, {dtype}, {phase}",
                    off <= tolerance,
                    f"logits are within {off:.1e} of the reference on CPU; expected {tolerance:.0e}",
                    relative_error=off,
                    tolerance=tolerance,
                )
