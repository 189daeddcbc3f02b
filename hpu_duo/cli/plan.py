"""``hpu-duo plan``: choose the shapes to capture, from a config.json and limits alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hpu_duo.cli.errors import user_errors
from hpu_duo.cli.options import Json

if TYPE_CHECKING:
    from graphs.planner import Traffic

_LIMITS = "Limits"
_OUTPUT = "Output"
_STRATEGIES = ("planned", "thinned", "upstream-unified", "exponential", "linear", "padding-aware")


def plan(
    model: Annotated[Path, typer.Option(help="Directory with config.json, or the file.")],
    num_blocks: Annotated[int, typer.Option(help="KV blocks that are held.", rich_help_panel=_LIMITS)],
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt and output together.",
            show_default="what the model serves",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Requests that run at the same time.", rich_help_panel=_LIMITS)
    ] = 32,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens of one step.", rich_help_panel=_LIMITS)
    ] = 2048,
    max_chunk_rows: Annotated[
        int, typer.Option(help="Prompts that may continue in the same step.", rich_help_panel=_LIMITS)
    ] = 1,
    block_size: Annotated[int, typer.Option(help="Tokens of one KV block.", rich_help_panel=_LIMITS)] = 128,
    graphs_budget: Annotated[int, typer.Option(help="Most shapes to capture, when planned.")] = 64,
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

    Needs no weights and no device. Costs are relative work, not time.
    """
    with user_errors():
        _check_strategy(strategy)
        # torch is slow to import: everything that can be refused without it comes first.
        from graphs import BucketLimits
        from graphs.planner import evaluate, prior
        from graphs.recording import read_shapes
        from hpu_duo.cli.bucket_plans import bucket_table, choose, listed, padding_table, step_cost, write

        traffic: Traffic | None = read_shapes(*from_shapes) if from_shapes else None
        from hpu_duo.cost.read_model import read_model

        size = read_model(model)
        limits = BucketLimits(
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len or size.max_positions,
            block_size,
            num_blocks,
            max_chunk_rows=max_chunk_rows,
        )
        cost = step_cost(size, block_size)
        names = list(_STRATEGIES) if compare else []
        chosen = choose(strategy, limits, cost, graphs_budget, traffic)
        measured = prior(limits) if traffic is None else traffic
        reports = {
            name: evaluate(
                chosen if name == strategy else choose(name, limits, cost, graphs_budget, traffic),
                limits,
                cost,
                measured,
            )
            for name in dict.fromkeys([strategy, *names])
        }
        if out is not None or gaudi_out is not None or not compare:
            shapes = listed(chosen)
            write(out, gaudi_out, shapes, f"{strategy}, for {size.name} and {limits}")
        else:
            shapes = ()
    if as_json:
        fields = {name: asdict(report) for name, report in reports.items()}
        typer.echo(json.dumps({"buckets": list(map(str, shapes)), "padding": fields}, indent=2))
        return
    console = Console()
    if shapes and not compare:
        console.print(bucket_table(shapes, cost))
    console.print(padding_table(reports, traffic is not None))


def _check_strategy(name: str) -> None:
    if name not in _STRATEGIES:
        raise ValueError(f"expected --strategy to be one of {', '.join(_STRATEGIES)}, got {name!r}")
