"""``hpu-duo warmup``: capture a table ahead of traffic, within a budget, and record what it cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hpu_duo.cli.arguments import options as opt
from hpu_duo.cli.arguments.loading import load_model
from hpu_duo.cli.arguments.options import Only, grouped
from hpu_duo.cli.terminal.errors import user_errors
from hpu_duo.config.overrides import EngineOverrides
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from graphs import BucketTable
    from hpu_duo.llm import HPUDuoModel
    from hpu_duo.startup.warm_up_estimate import WarmUpBudget

_TABLE = "Table"
_BUDGET = "Budget"
_OUTPUT = "Output"
_Offered = Annotated[
    EngineOverrides,
    Only(
        *(*opt.CUT, *opt.STEP, *opt.KEPT, "max_model_len", "max_num_batched_tokens", "max_chunk_rows"),
        *("block_size", "num_blocks", "kv_cache_bytes", "buckets", "max_captured_tokens"),
        *("graph_memory_bytes", "device_memory_utilization", "enable_prefix_caching"),
        *("num_prefix_snapshots", "tensor_parallel_size", "expert_parallel", "retrieval_parallel"),
        *("retrieval_parallel_context", "rank_timeout_s"),
        max_num_seqs=None,
    ),
]


@grouped
def warmup(
    *,
    model: opt.Model = None,
    graphs_budget: Annotated[
        int | None,
        typer.Option(
            help="Plan a table of at most so many shapes for these limits.",
            show_default="not planned",
            rich_help_panel=_TABLE,
        ),
    ] = None,
    from_shapes: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Plan for shapes that --record-shapes wrote; repeat for several.",
            show_default="a stated guess about traffic",
            rich_help_panel=_TABLE,
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Manifest whose table to warm up, exactly, if it is for this configuration.",
            show_default="no manifest",
            rich_help_panel=_TABLE,
        ),
    ] = None,
    phases: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Only shapes of these phases, such as --u,cs- or u,cs.",
            show_default="all",
            rich_help_panel=_TABLE,
        ),
    ] = None,
    max_graphs: Annotated[
        int | None,
        typer.Option(help="Refuse to capture more shapes.", show_default="no bound", rich_help_panel=_BUDGET),
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(
            help="Refuse what may take longer, and stop there.",
            show_default="no bound",
            rich_help_panel=_BUDGET,
        ),
    ] = None,
    max_gib: Annotated[
        float | None,
        typer.Option(
            help="Refuse what may take more memory, and stop there.",
            show_default="no bound",
            rich_help_panel=_BUDGET,
        ),
    ] = None,
    manifest: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the table and what each graph cost, anew after each graph; the costs of one that "
            "is there already make the estimate better.",
            show_default="not written",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Estimate and check; capture and write nothing."),
    ] = False,
    compile_only: Annotated[
        bool,
        typer.Option("--compile-only", help="Build graphs without launching them; on HPU."),
    ] = False,
    engine: _Offered,
    as_json: opt.Json = False,
) -> None:
    """Capture the shapes of a table: estimated first, within a budget, the largest first.

    Without --buckets, --replay or --graphs-budget the table is the default one. Graphs live in this process;
    what outlasts it are the compiler's caches on disk and the manifest, which --buckets takes elsewhere.
    """
    with user_errors():
        _check_one_table(buckets=engine.get("buckets"), replay=replay, graphs_budget=graphs_budget)
        if from_shapes and graphs_budget is None:
            raise ValueError("--from-shapes is what a table is planned from: expected --graphs-budget too")
        # What can be refused without weights comes before they are read.
        from graphs.manifest import read_manifest
        from hpu_duo.startup.warm_up import WarmUpStoppedError, parse_phases
        from hpu_duo.startup.warm_up_estimate import WarmUpBudget

        budget = WarmUpBudget(max_graphs, max_seconds, max_gib)
        if phases is not None:
            parse_phases(phases)
        for file in (replay, manifest if manifest is not None and manifest.exists() else None):
            if file is not None:
                read_manifest(file)
        if manifest is not None:
            check_file("--manifest", manifest)
        loaded = load_model(model, {**engine, "buckets": engine.get("buckets") or replay})
        from hpu_duo.cli.planning.warmup_views import (
            ProgressView,
            print_estimate,
            print_report,
            report_fields,
        )

        table = (
            None
            if graphs_budget is None
            else _planned(loaded, graphs_budget, budget, [Path(path) for path in from_shapes or []])
        )
        device = loaded.engine.runner.device.type
        if table is None and not loaded.engine.runner.executor.uses_table:
            raise ValueError(
                f"with --graphs {engine.get('graphs')} on {device} steps run at their "
                "own shapes and nothing is captured: expected --buckets, --replay, --graphs-budget or "
                "another --graphs"
            )
        prepared = loaded.prepare_warmup(
            table=table,
            budget=budget,
            phases=phases,
            manifest=manifest,
            replay=replay,
            compile_only=compile_only,
        )
        console = Console(stderr=True)
        for note in loaded.engine.notes:
            console.print(f"note: {note}", highlight=False, soft_wrap=True)
        print_estimate(console, prepared)
        report = prepared.dry_run()
    if not dry_run:
        with user_errors(WarmUpStoppedError), ProgressView(console) as view:
            report = prepared.run(view.done, manifest)
    if as_json:
        notes = [*loaded.engine.notes, *report.notes]
        typer.echo(json.dumps({**report_fields(report), "notes": notes}, indent=2))
    else:
        print_report(console, report)


def _check_one_table(**ways: object) -> None:
    given = ["--" + name.replace("_", "-") for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"expected one source of the table, got {' and '.join(given)}")


def _planned(
    loaded: HPUDuoModel, num_graphs: int, budget: WarmUpBudget, recordings: list[Path]
) -> BucketTable:
    from hpu_duo.startup.warm_up import plan_within

    return plan_within(loaded.engine, num_graphs, budget, recordings)
