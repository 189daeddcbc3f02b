"""Captured steps: right, repeatable, as large as estimated; and nothing is compiled after warm-up."""

from __future__ import annotations

from hpu_duo.lab.selftest.finding import Notes
from hpu_duo.lab.selftest.kernels import TOLERANCES
from hpu_duo.lab.selftest.steps import record_steps, run_captured, sampled_rows, worst_by_phase
from hpu_duo.lab.selftest.subject import Subject, run_prompts

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
