"""``hpu-duo plan``: choose the shapes to capture, from a config.json and limits alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hpu_duo.cli.arguments.capacity_choices import report_fields
from hpu_duo.cli.arguments.model_names import model_option
from hpu_duo.cli.arguments.option_groups import grouped
from hpu_duo.cli.arguments.options import LIMITS, Json, LimitOptions
from hpu_duo.cli.planning.hardware import HARDWARE, HardwareOptions, graph_bytes
from hpu_duo.cli.terminal.drawing import check_drawing
from hpu_duo.cli.terminal.errors import user_errors
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from graphs.planner import Traffic

_BUDGET = "Budget"
_OUTPUT = "Output"
_GIB = 1 << 30
# Users that no table has seen: tables are planned for those of seed 0, and compared on those of seed 1.
_MEASURED_SEED = 2
_STRATEGIES = ("planned", "thinned", "upstream-unified", "exponential", "linear", "padding-aware")


@grouped
def plan(
    *,
    model: Annotated[Path, model_option("Directory with config.json, or the file.", needs_weights=False)],
    num_blocks: Annotated[
        int | None,
        typer.Option(
            help="KV blocks that are held.",
            show_default="what fits on --hardware",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    asked: LimitOptions,
    graphs_budget: Annotated[
        int, typer.Option(help="Most shapes to capture, when planned.", rich_help_panel=_BUDGET)
    ] = 64,
    max_seconds: Annotated[
        float | None,
        typer.Option(help="Most time to capture them in.", show_default="no limit", rich_help_panel=_BUDGET),
    ] = None,
    seconds_per_graph: Annotated[
        float,
        typer.Option(
            help="What one graph takes of --max-seconds; public figures for Gaudi are 0.7 to 14.",
            rich_help_panel=_BUDGET,
        ),
    ] = 14.0,
    max_gib: Annotated[
        float | None,
        typer.Option(
            help="Most device memory for graphs, if each keeps intermediates of its own.",
            show_default="no limit",
            rich_help_panel=_BUDGET,
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="gaudi2 or gaudi3: show what fits and how fast it would be, and plan for it.",
            show_default="plan for any device",
            rich_help_panel=HARDWARE,
        ),
    ] = None,
    served: HardwareOptions,
    png: Annotated[
        Path | None,
        typer.Option(
            help="Also draw what fits and how fast it would be; needs matplotlib.",
            show_default="no picture",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    from_shapes: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Shapes that --record-shapes wrote; repeat for several.",
            show_default="a stated guess about traffic",
        ),
    ] = None,
    strategy: Annotated[str, typer.Option(help=f"One of {', '.join(_STRATEGIES)}.")] = "planned",
    compare: Annotated[bool, typer.Option("--compare", help="Show all strategies side by side.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the table, to load it with.", rich_help_panel=_OUTPUT),
    ] = None,
    gaudi_out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write it as VLLM_BUCKETING_FROM_FILE too.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose the shapes to capture for a model and limits, and say what padding costs.

    Needs no weights and no device. Costs are relative work, not time. With --hardware, also what fits and
    how fast it would be, computed from public figures.
    """
    with user_errors():
        _check_strategy(strategy)
        _check_writable({"--out": out, "--gaudi-out": gaudi_out})
        _check_hardware(hardware, num_blocks, served, png)
        # torch is slow to import: everything that can be refused without it comes first.
        from graphs import StepLimits
        from graphs.planner import GraphBudget, evaluate
        from graphs.promise import Promise
        from graphs.recording import read_shapes
        from hpu_duo.cli.planning.bucket_plans import bucket_table, choose, listed, padding_table, write

        in_time = GraphBudget(
            graphs_budget,
            seconds=max_seconds,
            seconds_per_graph=None if max_seconds is None else seconds_per_graph,
        )
        traffic: Traffic | None = read_shapes(*from_shapes) if from_shapes else None
        from hpu_duo.cost.read_model import read_model
        from hpu_duo.simulate import prior

        size = read_model(model)
        serving, found, kv_layers = (
            None,
            [],
            size.kv_layers(0.0, 0, 1, size.max_positions),
        )
        if hardware is not None:
            from hpu_duo.cost import step_cost, step_limits

            serving = served.on(hardware, asked.max_num_seqs, asked.max_num_batched_tokens, asked.block_size)
            found = served.compare(size, serving, in_time.most_graphs)
            if png is not None:
                from hpu_duo.cli.planning.plot import draw

                draw(size, serving, found, png)
            deployment = served.deployment(size, serving, asked.max_model_len or size.max_positions)
            limits = step_limits(deployment, asked.max_chunk_rows)
            if num_blocks is not None:
                limits = replace(limits, num_blocks=num_blocks)
            cost, kv_layers = step_cost(deployment), deployment.kv_layers
        else:
            assert num_blocks is not None, "checked above"
            from hpu_duo.cli.planning.bucket_plans import step_cost as any_cost

            limits = StepLimits(
                max_num_seqs=asked.max_num_seqs,
                max_num_batched_tokens=asked.max_num_batched_tokens,
                max_model_len=asked.max_model_len or size.max_positions,
                block_size=asked.block_size,
                num_blocks=num_blocks,
                decode_len=1,
                max_chunk_rows=asked.max_chunk_rows,
            )
            cost = any_cost(size, asked.block_size)
        budget = in_time
        if max_gib is not None:
            bytes_of = graph_bytes(model, size, kv_layers, asked.block_size)
            budget = replace(in_time, memory_bytes=max_gib * _GIB, bytes_of=bytes_of)
        names = list(_STRATEGIES) if compare else []
        chosen = choose(strategy, limits, cost, budget, traffic)
        if serving is not None:
            from hpu_duo.cost import WarmUp

            found[0] = replace(
                found[0], warm_up=WarmUp.of(len(chosen), deployment.num_layer_kinds, is_bound=False)
            )
        measured = prior(limits, seed=_MEASURED_SEED) if traffic is None else traffic
        reports = {
            name: evaluate(
                chosen if name == strategy else choose(name, limits, cost, budget, traffic),
                limits,
                cost,
                measured,
            )
            for name in dict.fromkeys([strategy, *names])
        }
        shapes = None
        if out is not None or gaudi_out is not None or not compare:
            shapes = listed(chosen)
            promise = Promise.by(cost, reports[strategy].mean)
            write(out, gaudi_out, shapes, f"{strategy}, for {size.name} and {limits}", promise)
    if as_json:
        fields: dict[str, Any] = {
            "limits": asdict(limits),
            "padding": {name: asdict(report) for name, report in reports.items()},
        }
        if shapes is not None:
            fields["buckets"] = list(map(str, shapes))
        if serving is not None:
            fields["hardware"] = report_fields(size, serving, found)
        typer.echo(json.dumps(fields, indent=2))
        return
    console = Console()
    if serving is not None:
        from hpu_duo.cli.planning.tables import print_report

        print_report(size, serving, found, console)
        console.print(f"Table for {limits.num_blocks:,} blocks and {found[0].describe()}", style="bold")
    if shapes is not None and not compare:
        console.print(bucket_table(shapes, cost))
    console.print(padding_table(reports, traffic is not None))


def _check_hardware(
    hardware: str | None,
    num_blocks: int | None,
    served: HardwareOptions,
    png: Path | None,
) -> None:
    if png is not None:
        check_drawing(png)
    if hardware is not None:
        return
    if num_blocks is None:
        raise ValueError("expected --num-blocks, or --hardware to find out how many fit, got neither")
    compared = {
        "--context": served.context,
        "--sparsity": served.sparsity,
        "--kv-cache-dtype": served.kv_cache_dtype,
        "--png": png,
    }
    for name, value in compared.items():
        if value is not None:
            raise ValueError(f"expected --hardware with {name}, got none")


def _check_writable(files: Mapping[str, Path | None]) -> None:
    for name, file in files.items():
        if file is not None:
            check_file(name, file)


def _check_strategy(name: str) -> None:
    if name not in _STRATEGIES:
        raise ValueError(f"expected --strategy to be one of {', '.join(_STRATEGIES)}, got {name!r}")
