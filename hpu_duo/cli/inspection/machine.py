"""``hpu-duo doctor`` and ``selftest``: what works on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hpu_duo.cli.options import Engine, Json, grouped, load_model, model_option
from hpu_duo.cli.terminal import Waiting, mark, show_bytes, user_errors
from hpu_duo.config.overrides import EngineOverrides
from hpu_duo.lab.selftest.facts import Fact, machine_facts


@grouped
def doctor(
    *,
    model: Annotated[
        Path | None,
        model_option(
            "Directory of a checkpoint: load it, and say what it is served with.",
            show_default="none is loaded",
        ),
    ] = None,
    engine: Engine,
    collectives: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=(
                "Also start N processes, exchange data between their devices, and check the results: "
                "a first test of a machine with several cards."
            ),
            show_default="not checked",
        ),
    ] = None,
    rates: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also measure copies between host and device, and files in a folder: for offloading.",
            show_default="not measured",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print versions, devices and capture backends, and why something is not usable.

    With --model also what its engine makes of the options: device, dtype, kernels, limits, memory, buckets.
    The exit code is 0 if models can run on the CPU of this machine and --collectives found no fault, else 1.
    """
    facts = list(machine_facts())
    if collectives is not None:
        with user_errors():
            facts.append(_collectives(str(engine.get("device")), collectives))
    if rates is not None:
        from hpu_duo.lab.selftest.rates import offload_facts

        with user_errors(OSError), Waiting("measuring copies"):
            facts += offload_facts(str(engine.get("device")), rates)
    if model is not None:
        with user_errors():
            facts += _resolved(model, engine)
    if as_json:
        typer.echo(json.dumps([asdict(fact) for fact in facts], indent=2))
    else:
        _show(facts)
    runs = any((f.topic, f.name, f.is_usable) == ("devices", "cpu", True) for f in facts)
    if not runs or any(f.topic == "collectives" and not f.is_usable for f in facts):
        raise typer.Exit(1)


def _collectives(device: str, num_processes: int) -> Fact:
    from hpu_duo.device import WorkerError
    from hpu_duo.lab.collectives_check import check_collectives

    try:
        with Waiting(f"checking what {num_processes} processes exchange"):
            found = check_collectives(device, num_processes)
    except WorkerError as error:
        reason, _, trace = str(error).partition("\n")
        typer.echo(trace, err=True, nl=False)
        return Fact("collectives", device, False, reason)
    devices = ", ".join(dict.fromkeys(found.devices))
    detail = (
        f"{num_processes} processes on {devices}: broadcast, all_reduce, all_gather and all_to_all "
        f"are right; "
        f"{found.num_bytes >> 20} MiB summed in {found.seconds * 1e3:.1f} ms, "
        f"{found.bus_bandwidth / 1e9:.1f} GB/s on the bus"
    )
    return Fact("collectives", found.backend, True, detail)


def _resolved(model: Path, engine: EngineOverrides) -> Iterator[Fact]:
    loaded = load_model(model, engine)
    stats = loaded.stats()
    for name, value in stats.resolved.items().items():
        shown = show_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)
        yield Fact("model", name, None, shown)
    for note in stats.notes:
        yield Fact("model", "note", None, note)


def _show(facts: list[Fact]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column()
    table.add_column(overflow="fold")
    topic, console = "", Console()
    for fact in facts:
        sign = "" if fact.is_usable is None else mark(fact.is_usable, console)
        table.add_row("" if fact.topic == topic else fact.topic, fact.name, sign, fact.detail)
        topic = fact.topic
    console.print(table)


def selftest(
    device: Annotated[str, typer.Option(help="auto, hpu, cuda, cpu or hpu-sim.", metavar="DEVICE")] = "auto",
    model: Annotated[
        Path | None,
        model_option("Checkpoint whose steps are timed.", show_default="the built-in model"),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Accelerator to predict times for: gaudi2 or gaudi3.", show_default="nothing is predicted"
        ),
    ] = None,
    cards: Annotated[
        int | None,
        typer.Option(min=1, help="Cards that exchange data.", show_default="all"),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Stages to run, such as machine,kernels.", show_default="all")
    ] = None,
    output: Annotated[Path, typer.Option(help="Directory for selftest.md and selftest.json.")] = Path(),
    stage_deadline: Annotated[
        float, typer.Option(min=1.0, help="Seconds that a stage may take before it is aborted.")
    ] = 900.0,
    max_seconds: Annotated[
        float, typer.Option(min=1.0, help="Seconds of all stages; those that have not begun then are failed.")
    ] = 1200.0,
) -> None:
    """Test a device in stages and write a report: the first thing to do with a new card.

    A stage that fails does not end the others, even if it takes its process with it. Attach both files to a
    report of a problem: they hold versions, variables of the vendor's software and measurements, no prompts
    and no names of the machine or its user. The exit code is 0 if every stage passed, else 1.
    """
    console = Console(stderr=True)
    with user_errors():
        from hpu_duo.builtin import MODEL_DIR
        from hpu_duo.device import usable_name
        from hpu_duo.lab.selftest.selftest import run_selftest
        from hpu_duo.lab.selftest.subject import Subject
        from hpu_duo.modeling.loading import load_tokenizer, read_config
        from hpu_duo.planning import find_hardware

        if hardware is not None:
            find_hardware(hardware)
        if model is not None:  # refused before minutes have passed
            read_config(model)
            load_tokenizer(model)
        # A device that is named and not usable stays: the report has to say why.
        name = usable_name(device) if device == "auto" else device
        subject = Subject(name, model or MODEL_DIR, hardware, cards)
        report = run_selftest(
            subject,
            only=tuple(filter(None, (only or "").split(","))),
            stage_deadline_s=stage_deadline,
            deadline_s=max_seconds,
            progress=lambda title: console.print(f"[dim]{title}[/dim]"),
        )
        paths = report.write(output)
    shown = Console()
    for stage in report.stages:
        shown.print(mark(stage.is_ok, shown), stage.title, f"({stage.seconds:.1f} s)")
        if stage.error is not None:
            shown.print(f"    {stage.error.splitlines()[-1]}", markup=False)
        for finding in stage.findings:
            if finding.is_ok is False:
                shown.print(f"    {finding.name}: {finding.detail}", markup=False)
    shown.print("wrote " + " and ".join(map(str, paths)), markup=False)
    if not report.is_ok:
        raise typer.Exit(1)
