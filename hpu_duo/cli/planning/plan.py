"""``hpu-duo plan``: choose the shapes to capture, from a config.json and limits alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hpu_duo.cli.arguments.options import LIMITS, Json, Kept, changed, grouped
from hpu_duo.cli.arguments.values import model_option
from hpu_duo.cli.planning.hardware import HARDWARE, HardwareOptions, graph_bytes, report_fields
from hpu_duo.cli.planning.plan_options import BudgetOptions, OutputOptions, PlannedLimits, TableOptions
from hpu_duo.cli.terminal.errors import user_errors
from hpu_duo.cli.terminal.waiting import Waiting
from hpu_duo.config.overrides import EngineOverrides

if TYPE_CHECKING:
    from graphs import BatchShape
    from graphs.planner import PaddingReport
    from hpu_duo.cli.planning.setting import Setting


@grouped
def plan(
    *,
    model: Annotated[Path, model_option("Directory with config.json, or the file.", needs_weights=False)],
    num_blocks: Annotated[
        int | None,
        typer.Option(
            help="KV blocks that are allocated.",
            show_default="what fits on --hardware",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    asked: PlannedLimits,
    within: BudgetOptions,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="gaudi2 or gaudi3: show what fits and how fast it would be, and plan for it.",
            show_default="plan for any device",
            rich_help_panel=HARDWARE,
        ),
    ] = None,
    served: HardwareOptions,
    kept: Kept,
    output: OutputOptions,
    table: TableOptions,
    as_json: Json = False,
) -> None:
    """Choose the shapes to capture for a model and limits, and say what padding costs.

    Needs no weights and no device. Costs are relative work, not time. With --hardware, also what fits and
    how fast it would be, computed from public figures.
    """
    with user_errors():
        table.check(asked["trim_chunks"])
        output.check()
        if hardware is None:
            _check_without_hardware(num_blocks, served, kept, output)
        # torch is slow to import: everything that can be refused without it comes first.
        from graphs.planner import evaluate
        from graphs.traffic_watch import PlannedPadding
        from hpu_duo.cli.planning.bucket_plans import choose, listed, measured_on, write
        from hpu_duo.cli.planning.setting import Setting

        most_graphs, recorded = within.in_time().most_graphs, table.recorded()
        if hardware is not None:
            setting = Setting.on(hardware, model, served, asked, kept, num_blocks, most_graphs)
        else:
            assert num_blocks is not None, "checked above"
            setting = Setting.anywhere(model, asked, num_blocks)
        if output.png is not None and setting.serving is not None:
            from hpu_duo.cli.planning.plot import draw

            with Waiting("drawing"):
                draw(setting.size, setting.serving, setting.found, output.png)
        limits, cost = setting.limits, setting.cost
        budget = within.budget(
            lambda: graph_bytes(model, setting.size, setting.kv_layers, limits.block_size, limits.decode_len)
        )
        with Waiting("searching buckets"):
            chosen = {name: choose(name, limits, cost, budget, recorded) for name in table.names}
        setting = setting.with_table(chosen[table.strategy])
        with Waiting("measuring what padding costs on simulated traffic"):
            reports = {
                name: evaluate(
                    each,
                    limits,
                    cost,
                    measured_on(each, limits, cost, recorded, trims_chunks=asked["trim_chunks"]),
                )
                for name, each in chosen.items()
            }
        shapes = None
        if output.takes_table or not table.compare:
            shapes = listed(chosen[table.strategy])
            comment = f"{table.strategy}, for {setting.size.name} and {limits}"
            planned_padding = PlannedPadding.by(cost, reports[table.strategy].mean)
            write(output.out, output.gaudi_out, shapes, comment, planned_padding)
    if as_json:
        typer.echo(json.dumps(_fields(setting, reports, shapes), indent=2))
    else:
        _show(setting, reports, None if table.compare else shapes, recorded is not None)


def _fields(
    setting: Setting, reports: Mapping[str, PaddingReport], shapes: tuple[BatchShape, ...] | None
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "limits": asdict(setting.limits),
        "padding": {name: asdict(report) for name, report in reports.items()},
    }
    if shapes is not None:
        fields["buckets"] = list(map(str, shapes))
    if setting.serving is not None:
        fields["hardware"] = report_fields(setting.size, setting.serving, list(setting.found))
    return fields


def _show(
    setting: Setting,
    reports: Mapping[str, PaddingReport],
    shapes: tuple[BatchShape, ...] | None,
    is_recorded: bool,
) -> None:
    from hpu_duo.cli.planning.bucket_plans import bucket_table, padding_table
    from hpu_duo.cli.planning.tables import print_report

    console = Console()
    if setting.serving is not None:
        print_report(setting.size, setting.serving, setting.found, console)
        planned_for = setting.found[0].describe()
        console.print(f"Table for {setting.limits.num_blocks:,} blocks and {planned_for}", style="bold")
    if shapes is not None:
        console.print(bucket_table(shapes, setting.cost))
    console.print(padding_table(reports, is_recorded))


def _check_without_hardware(
    num_blocks: int | None, served: HardwareOptions, kept: EngineOverrides, output: OutputOptions
) -> None:
    if num_blocks is None:
        raise ValueError("expected --num-blocks, or --hardware to find out how many fit, got neither")
    compared = {
        "--context": served.context,
        "--sparsity": served.sparsity,
        "--kv-cache-dtype": served.kv_cache_dtype,
        "--png": output.png,
        **dict.fromkeys(changed(kept), True),
    }
    for name, value in compared.items():
        if value is not None:
            raise ValueError(f"expected --hardware with {name}, got none")
