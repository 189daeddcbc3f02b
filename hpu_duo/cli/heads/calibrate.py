"""``hpu-duo calibrate``: choose what each head keeps, from its attention on prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hpu_duo.cli.arguments.option_groups import Only, grouped
from hpu_duo.cli.arguments.options import Json, Model
from hpu_duo.cli.heads.calibrate_options import MethodOptions, PromptOptions, request_of
from hpu_duo.cli.heads.identify_options import RunOptions
from hpu_duo.cli.terminal.errors import user_errors
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.kv_calibration import CalibratedPlan, Calibration, PlannedHead


@grouped
def calibrate(
    *,
    output: Annotated[Path, typer.Option(metavar="FILE.yaml", help="The plan; no file is overwritten.")],
    model: Model = None,
    method: Annotated[
        str,
        typer.Option(
            help="ada-kv: one policy, each layer's budget shared by its heads; fastgen: for each head the "
            "cheapest set that recovers enough of its attention."
        ),
    ] = "ada-kv",
    settings: MethodOptions,
    prompts: PromptOptions,
    run: Annotated[RunOptions, Only("seed", "device", "dtype", "threads")],
    as_json: Json = False,
) -> None:
    """Choose what each KV head keeps by its attention on prompts, and write the KV plan for --kv-plan.

    The built-in model takes some seconds.
    """
    with user_errors():
        run.check()
        if output.exists():
            raise ValueError(f"{output} exists already: choose another file for --output")
        check_file("--output", output)
        request = request_of(model, method, settings, prompts, run)
        # What torch prints would stand between the table and its reader.
        from hpu_duo.cli.heads.run import cpu_set_up, quiet

        quiet()
        from hpu_duo.kv_calibration import Calibration

    with cpu_set_up(run.threads):
        with user_errors():
            calibration = Calibration(request)
        with user_errors(()):
            _measure(calibration)
    found = calibration.result()
    with user_errors(OSError):
        found.plan.save(output, ("hpu-duo calibrate", *calibration.origin))
    if as_json:
        typer.echo(json.dumps(_fields(output, calibration, found), indent=2))
    else:
        _show(output, calibration, found)


def _measure(calibration: Calibration) -> None:
    from hpu_duo.cli.heads.view import IdentifyView

    view = IdentifyView(Console(stderr=True), calibration.total, is_silent=False)
    try:
        for progress in calibration.run():
            view.moved(progress)
    finally:
        view.ended()


def _fields(output: Path, calibration: Calibration, found: CalibratedPlan) -> dict[str, Any]:
    return {
        "output": str(output),
        "origin": list(calibration.origin),
        "prompt_tokens": list(calibration.lengths),
        "num_asked": found.num_asked,
        "num_kept": found.num_kept,
        "heads_by_size": {str(size): count for size, count in found.heads_by_size.items()},
        "layers": [
            [
                {
                    "kind": head.kind,
                    "keep": head.keep.what,
                    "num_asked": head.num_asked,
                    "num_kept": None if head.keep.budget is None else int(head.keep.budget),
                    "recovered": head.recovered,
                }
                for head in heads
            ]
            for heads in found.layers
        ],
    }


def _show(output: Path, calibration: Calibration, found: CalibratedPlan) -> None:
    console = Console()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("layer", "head", "kind", "asked", "tokens", "recovered"):
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    for layer, heads in enumerate(found.layers):
        for number, head in enumerate(heads):
            table.add_row(str(layer) if number == 0 else "", str(number), *_cells(head))
    console.print(table)
    shortest, longest = (f"{each:,}" for each in (min(calibration.lengths), max(calibration.lengths)))
    console.print(
        f"\nprompts: {calibration.total}, of {shortest} to {longest} tokens; shares are means over them",
        highlight=False,
    )
    if found.heads_by_size:
        sizes = ", ".join(f"{count} of {size:,}" for size, count in found.heads_by_size.items())
        added = found.num_kept - found.num_asked
        console.print(
            f"heads with a budget: {sizes} tokens\n{found.num_asked:,} tokens asked for in all, "
            f"{added:,} added by rounding up ({added / found.num_asked:.1%})",
            highlight=False,
        )
    console.print(f"{output}: for --kv-plan", highlight=False, markup=False)


def _cells(head: PlannedHead) -> tuple[str, str, str, str]:
    has_window = head.recovered is None
    tokens = "" if has_window else "all" if head.keep.budget is None else f"{int(head.keep.budget):,}"
    asked = "" if head.num_asked is None else f"{head.num_asked:,}"
    return head.kind, asked, tokens, "" if head.recovered is None else f"{head.recovered:.3f}"
