"""``hpu-duo warmup``: capture a table ahead of traffic, within a budget, and record what it cost."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hpu_duo.cli import options as opt
from hpu_duo.cli.options import Only, grouped, load_model, option_in
from hpu_duo.cli.terminal import show_bytes, user_errors
from hpu_duo.config.overrides import EngineOverrides
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from graphs import BucketTable
    from graphs.manifest import GraphRecord
    from hpu_duo.llm import HPUDuoModel
    from hpu_duo.startup.warm_up import WarmUp, WarmUpReport
    from hpu_duo.startup.warm_up_estimate import Estimate, WarmUpBudget

_table_option = option_in("Table")
_budget_option = option_in("Budget")
_output_option = option_in("Output")
_Offered = Annotated[
    EngineOverrides,
    Only(
        *(
            *opt.CUT,
            *opt.STEP,
            *opt.KEPT,
            *opt.STORED,
            "max_model_len",
            "max_num_batched_tokens",
            "max_chunk_rows",
        ),
        *("block_size", "num_blocks", "kv_cache_bytes", "buckets", "max_captured_tokens"),
        *("graph_memory_bytes", "device_memory_utilization", "enable_prefix_caching"),
        *("num_prefix_snapshots", "tensor_parallel_size", "expert_parallel", "retrieval_parallel"),
        *("retrieval_parallel_context", "rank_timeout_s", "speculative_config"),
        max_num_seqs=None,
    ),
]


@grouped
def warmup(
    *,
    model: opt.Model = None,
    graphs_budget: Annotated[
        int | None,
        _table_option(
            "Plan a table of at most this number of shapes for these limits.", show_default="not planned"
        ),
    ] = None,
    from_shapes: Annotated[
        list[Path] | None,
        _table_option(
            "Plan for shapes that --record-shapes wrote; repeat for several.",
            metavar="FILE",
            show_default="a stated guess about traffic",
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        _table_option(
            "Manifest whose table to warm up, exactly, if it is for this configuration.",
            metavar="FILE",
            show_default="no manifest",
        ),
    ] = None,
    phases: Annotated[
        str | None,
        _table_option(
            "Only shapes of these phases, such as --u,cs- or u,cs.", metavar="LIST", show_default="all"
        ),
    ] = None,
    max_graphs: Annotated[
        int | None, _budget_option("Refuse to capture more shapes.", show_default="no bound")
    ] = None,
    max_seconds: Annotated[
        float | None, _budget_option("Fail if it may take longer, and stop there.", show_default="no bound")
    ] = None,
    max_gib: Annotated[
        float | None,
        _budget_option("Fail if it may need more memory, and stop there.", show_default="no bound"),
    ] = None,
    manifest: Annotated[
        Path | None,
        _output_option(
            "Write the table and the cost of each graph, after each graph; costs of an existing "
            "file improve the estimate.",
            metavar="FILE",
            show_default="not written",
        ),
    ] = None,
    jobs: Annotated[
        int,
        _budget_option(
            "Processes that compile side by side into the compiler's cache on disk, this one included: "
            "each loads the model, and on HPU takes a card.",
            min=1,
        ),
    ] = 1,
    resume: Annotated[
        bool,
        _output_option(
            "Skip shapes that an earlier warm-up with the same --manifest or --replay has left in the "
            "compiler's cache on disk, such as one that was killed.",
            "--resume/--no-resume",
        ),
    ] = True,
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
            resume=resume,
            num_jobs=jobs,
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


_MOST_ROWS = 10
_SIZES = "computed from sizes"


class ProgressView:
    """A bar on a terminal, with the shape that was captured last; nothing elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("warm-up"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("graphs"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> ProgressView:
        self._bar.start()
        self._bar.add_task("", total=None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def done(self, done: int, total: int, record: GraphRecord) -> None:
        """Show that a graph has been captured."""
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, description=_described(record))


def print_estimate(console: Console, prepared: WarmUp) -> None:
    """Print graphs, seconds and memory, and the origin of the figures, before the warm-up starts."""
    estimate = prepared.estimate
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    phases = {str(bucket.phase): 0 for bucket in sorted(prepared.buckets)}
    for bucket in prepared.buckets:
        phases[str(bucket.phase)] += 1
    listed = "  ".join(f"{phase} x {count}" for phase, count in phases.items())
    table.add_row("graphs", f"{len(prepared.buckets)} ({prepared.backend}): {listed}")
    table.add_row("time", f"{_seconds(estimate)}; {_source(estimate, f'from: {estimate.source}')}")
    if prepared.num_jobs > 1:
        table.add_row("jobs", f"{prepared.num_jobs} processes, which take 1/{prepared.num_jobs} at best")
    if estimate.trace_s:
        table.add_row("tracing", f"{_duration(estimate.trace_s)} of it, each kind of layer once a graph")
    table.add_row(
        "memory",
        f"{show_bytes(estimate.kept_bytes)} kept by graphs, {_source(estimate, _SIZES)}; "
        f"{show_bytes(estimate.transient_bytes)} while the largest step runs, {_SIZES}",
    )
    if prepared.skipped:
        table.add_row("skipped", _skipped(prepared))
    console.print(table)
    for note in prepared.notes:
        console.print(f"note: {note}", highlight=False)


def print_report(console: Console, report: WarmUpReport) -> None:
    """Print what the graphs cost, the slowest first."""
    if report.is_dry_run:
        console.print("nothing was captured: a dry run")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("slowest graphs")
    table.add_column("seconds", justify="right")
    table.add_column("memory", justify="right")
    measured = [record for record in report.records if record.seconds is not None]
    for record in sorted(measured, key=lambda each: each.seconds or 0.0, reverse=True)[:_MOST_ROWS]:
        table.add_row(str(record.shape), f"{record.seconds:.2f}", show_bytes(max(0, record.num_bytes or 0)))
    if measured:
        console.print(table)
    skipped = f", {report.num_skipped} skipped" if report.num_skipped else ""
    console.print(
        f"{report.num_captured} graphs captured{skipped} in {report.seconds:.1f} s"
        + (f", {report.trace_s:.1f} s of tracing" if report.trace_s else ""),
        highlight=False,
    )


def report_fields(report: WarmUpReport) -> dict[str, Any]:
    """The same as JSON values: seconds, bytes, counts."""
    estimate = report.estimate
    return {
        "is_dry_run": report.is_dry_run,
        "estimate": {
            "num_graphs": len(estimate.graphs),
            "num_measured": estimate.num_measured,
            "low_s": estimate.low_s,
            "high_s": estimate.high_s,
            "trace_s": estimate.trace_s,
            "kept_bytes": estimate.kept_bytes,
            "transient_bytes": estimate.transient_bytes,
            "source": estimate.source,
            "unknown": estimate.unknown,
            "graphs": [
                {
                    "shape": str(graph.shape),
                    "low_s": graph.low_s,
                    "high_s": graph.high_s,
                    "bytes": graph.num_bytes,
                }
                for graph in estimate.graphs
            ],
        },
        "num_captured": report.num_captured,
        "num_skipped": report.num_skipped,
        "seconds": report.seconds,
        "trace_s": report.trace_s,
        "graphs": [
            {"shape": str(record.shape), "seconds": record.seconds, "bytes": record.num_bytes}
            for record in report.records
        ],
        "notes": list(report.notes),
    }


def _skipped(prepared: WarmUp) -> str:
    place = "" if prepared.cache is None else f" {prepared.cache.directory}"
    total = len(prepared.skipped) + len(prepared.buckets)
    return f"{len(prepared.skipped)} of {total} graphs, which are in the compiler's cache{place} already"


def _described(record: GraphRecord) -> str:
    return str(record.shape) if record.seconds is None else f"{record.shape} {record.seconds:.1f} s"


def _seconds(estimate: Estimate) -> str:
    low, high = estimate.low_s, estimate.high_s
    if high < 60:
        return f"{low:.1f} to {high:.1f} s"
    return f"{low / 60:.1f} to {high / 60:.1f} min"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} min"


def _source(estimate: Estimate, unmeasured: str) -> str:
    if not estimate.num_measured:
        return unmeasured
    if estimate.num_measured == len(estimate.graphs):
        return "as measured before"
    return f"{estimate.num_measured} measured before, the others {unmeasured}"
