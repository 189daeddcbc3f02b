"""``hpu-duo selftest``: everything that the runtime needs of a device, tried in stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hpu_duo.cli.arguments.values import model_option
from hpu_duo.cli.terminal.errors import user_errors
from hpu_duo.cli.terminal.streams import mark


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
) -> None:
    """Test a device in stages and write a report: the first thing to do with a new card.

    A stage that fails does not end the others, even if it takes its process with it. Attach both files to a
    report of a problem: they hold versions, variables of the vendor's software and measurements, no prompts.
    The exit code is 0 if every stage passed, else 1.
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
