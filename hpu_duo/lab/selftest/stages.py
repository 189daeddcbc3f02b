"""The stages of a self-test in order, and what they do. A new one is a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hpu_duo.device import resolve_device
from hpu_duo.lab.collectives_check import check_collectives
from hpu_duo.lab.selftest.finding import Notes
from hpu_duo.lab.selftest.machine import describe_machine
from hpu_duo.lab.selftest.operators import compare_operators
from hpu_duo.lab.selftest.steps import (
    record_steps,
    run_captured,
    run_uncaptured,
    sampled_rows,
    worst_by_phase,
)
from hpu_duo.lab.selftest.subject import Subject, run_prompts
from hpu_duo.lab.selftest.timing import time_steps
from hpu_duo.startup.blueprint import line_bytes
from kernels_ref import Softmax
from kernels_ref.hpu.trial import try_operators

_PROCESSES_WITHOUT_CARDS = 2


def exchange(subject: Subject, notes: Notes) -> None:
    """Sum and send tensors between one process for each card, by the device's own backend.

    Devices that are no cards, such as a CPU, are shared by two processes.
    """
    size = subject.num_cards or _num_cards(subject.kind)
    if size < 2:
        notes.fact("cards", f"{size}: there is nobody to exchange with")
        return
    notes.begin(f"{size} processes")
    result = check_collectives(subject.kind, size)
    notes.check(
        f"{result.backend} between {size} processes",
        True,
        "broadcasts, sums, gathers and exchanges all to all are right; "
        f"{result.num_bytes >> 20} MiB summed in "
        f"{result.seconds * 1e3:.1f} ms, {result.bus_bandwidth / 1e9:.1f} GB/s on the bus",
        seconds=result.seconds,
        bus_bytes_per_s=result.bus_bandwidth,
        num_bytes=result.num_bytes,
    )


def _num_cards(kind: str) -> int:
    if kind == "hpu":
        from hpu_duo.device import habana

        return habana.num_devices()
    return torch.cuda.device_count() if kind == "cuda" else _PROCESSES_WITHOUT_CARDS


_HEADS = {"Llama 3": (4, 128), "Llama 2": (1, 128), "Qwen 2.5": (7, 128), "Llama 3.2 1B": (4, 64)}
"""Query heads of a key/value head, and head size."""


def try_fused(subject: Subject, notes: Notes) -> bool:
    """Note which operators pass their trial; those that do not are left out when a model is loaded.

    Returns:
        Whether any operator passes for all of them.
    """
    device, always = resolve_device(subject.device), True
    for model, (group_size, head_dim) in _HEADS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for softmax in Softmax:
                name = f"{model}, {str(dtype).removeprefix('torch.')}, {softmax.value} softmax"
                notes.begin(f"fused operators for heads of {name}")
                trial = try_operators(device, dtype, group_size, head_dim, softmax, line_bytes(device))
                operators = trial.operators
                passed = ", ".join(operators.names) or "none"
                failed = f"; {'; '.join(trial.problems)}" if trial.problems else ""
                notes.fact(f"fused operators, {name}", f"passed: {passed}{failed}", **operators._asdict())
                always = always and bool(operators.names)
    return always


def compare_generation(subject: Subject, notes: Notes) -> None:
    """Generate greedily from prompts that are served together, as users do, with the device's own defaults.

    In float32 the tokens have to be equal. In bfloat16 a token may change where two candidates are nearly as
    likely, so only how far both agree is reported.
    """
    for dtype in ("float32", "bfloat16"):
        notes.begin(f"generation in {dtype}")
        there = subject.load(dtype=dtype, graphs="auto")
        here = subject.load("cpu", attention="reference", dtype=dtype, graphs="eager")
        prompts = subject.prompts(there.config.get_text_config().vocab_size)
        got, expected = run_prompts(there, prompts), run_prompts(here, prompts)
        same = [_num_equal(*pair) for pair in zip(got, expected)]
        total, equal = sum(map(len, expected)), sum(same)
        detail = f"{equal} of {total} tokens of {len(prompts)} prompts before the first difference to the CPU"
        values = {"equal": equal, "total": total}
        if dtype == "float32":
            notes.check(dtype, equal == total, detail, **values)
        else:
            notes.fact(dtype, detail, **values)


def _num_equal(got: tuple[int, ...], expected: tuple[int, ...]) -> int:
    """Tokens up to the first that differs."""
    pairs = list(zip(got, expected))
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))


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


_MIB = 1 << 20


def capture(subject: Subject, notes: Notes, backend: str) -> None:
    """Capture the default table, replay every recorded step twice, then serve random traffic.

    Args:
        backend: name of a capture backend, or "auto".
    """
    steps = record_steps(subject)
    notes.begin(f"loading with graphs={backend}")
    model = steps.load(subject, dtype="float32", graphs=backend)
    notes.begin("warm-up")
    report = model.warmup(lambda done, total, record: notes.begin(f"graph {done + 1} of {total}"))
    estimated = report.estimate.kept_bytes
    kept = sum(record.num_bytes or 0 for record in report.records)
    notes.check(
        "capture",
        report.num_captured == len(steps.table),
        f"{report.num_captured} of {len(steps.table)} graphs in {report.seconds:.1f} s, "
        f"{kept / _MIB:.1f} MiB kept; estimated {estimated / _MIB:.1f} MiB",
        kept_bytes=kept,
        estimated_bytes=estimated,
        seconds=report.seconds,
    )
    for record in report.records:
        seconds, num_bytes = record.seconds or 0.0, record.num_bytes or 0
        notes.fact(
            str(record.shape),
            f"captured in {seconds:.2f} s, {num_bytes / _MIB:.2f} MiB kept",
            seconds=seconds,
            num_bytes=num_bytes,
        )
    before = model.engine.runner.watch.snapshot()
    notes.begin("replay")
    for phase, error in worst_by_phase(model, steps, run_captured).items():
        detail = f"logits are within {error:.1e} of the CPU"
        notes.check(f"replay {phase}", error <= TOLERANCES["float32"], detail, relative_error=error)
    last = steps.messages[-1]
    twice = [sampled_rows(run_captured(model, last), last) for _ in range(2)]
    notes.check("replay twice", bool((twice[0] == twice[1]).all()), "the same step gives the same logits")
    notes.begin("traffic")
    vocab_size = model.config.get_text_config().vocab_size
    for seed in range(3):
        run_prompts(model, Subject(subject.device, seed=seed).prompts(vocab_size))
    found = model.engine.runner.watch.snapshot() - before
    what = "; ".join(found.findings) or "nothing was compiled, captured or sent to the host's CPU"
    counts = {"num_graphs": found.num_graphs, "num_fallbacks": found.num_fallbacks}
    notes.check("after warm-up", not found.findings, what, **counts)


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
