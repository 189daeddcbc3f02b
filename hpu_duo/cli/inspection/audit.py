"""``hpu-duo audit``: the operators and memory of every step on an HPU, from a config.json alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from hpu_duo.cli.options import CUT, KEPT, STORED, Json, Only, grouped, model_option, of_setting
from hpu_duo.cli.terminal import show_bytes, user_errors
from hpu_duo.config.overrides import EngineOverrides

if TYPE_CHECKING:
    from hpu_duo.lab.audit import AuditReport, Finding, LayerRecipe, OperatorUse, StepAudit, Structure

FOUND_FORBIDDEN = 1
_Offered = Annotated[
    EngineOverrides,
    Only(
        *(*CUT, *KEPT, *STORED, "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
        "max_chunk_rows",
        *("block_size", "num_blocks", "kv_cache_bytes", "device_memory_utilization"),
        *("enable_prefix_caching", "num_prefix_snapshots", "buckets"),
    ),
]


@grouped
def audit(
    *,
    model: Annotated[
        Path, model_option("Directory with a config.json; no weights needed.", needs_weights=False)
    ],
    hardware: Annotated[
        str, typer.Option(help="gaudi2 or gaudi3: determines the number of KV blocks, unless it is set.")
    ] = "gaudi3",
    asked: _Offered,
    attention: Annotated[
        str, of_setting("attention", help="Attention kernels: reference, or hpu for the fused operators.")
    ] = "reference",
    bucket: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHAPE", help="Only this bucket, such as csu/q2048/s64/u512/l32; repeat for several."
        ),
    ] = None,
    fail_on_unknown: Annotated[
        bool,
        typer.Option("--fail-on-unknown", help="End with 1 for operators that public sources do not show."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Trace every step without weights or device, and say what it asks of an HPU.

    Ends with 1 if a step does what an HPU does badly, wrongly or not at all. Proves nothing about
    compilers or speed.
    """
    with user_errors():
        buckets = cast(Path | None, asked.pop("buckets"))
        if buckets is not None and bucket:
            raise ValueError("expected --buckets or --bucket, got both")
        # torch is slow to import: everything that can be refused without it comes first.
        from graphs import BucketTable
        from graphs.bucket_file import read_table
        from hpu_duo.config.engine import EngineConfig
        from hpu_duo.lab.audit import build_structure
        from hpu_duo.planning import find_hardware

        table = BucketTable.from_strings(bucket) if bucket else read_table(buckets) if buckets else None
        config = EngineConfig.of(model, **asked).override(buckets=table, attention=attention)
        structure = build_structure(config, find_hardware(hardware))
    report = _traced(structure, shows_progress=not as_json)
    if as_json:
        typer.echo(json.dumps(report_fields(report), indent=2))
    else:
        print_report(report)
    if report.violations or (fail_on_unknown and report.unknown):
        raise typer.Exit(FOUND_FORBIDDEN)


def _traced(structure: Structure, *, shows_progress: bool) -> AuditReport:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from hpu_duo.lab.audit import audit as trace

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    is_hidden = not (shows_progress and console.is_terminal)
    with user_errors(), Progress(*columns, console=console, transient=True, disable=is_hidden) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name)

        return trace(structure, progress)


NOT_SHOWN = "not shown in public sources"
_CAVEAT = (
    "Traced on tensors without data, operator by operator and before any fusion; this project has not run on "
    "a Gaudi. An operator that sources show may still be refused for a dtype or a shape, and one that they "
    "do not show may work."
)


def print_report(report: AuditReport, console: Console | None = None) -> None:
    """Print tables of memory, of steps, of operators, and of findings."""
    from hpu_duo.lab.audit import native_sources

    console = console or Console()
    _print(console, f"{report.model} on an HPU", _held(report))
    _print(console, "Steps: one graph of each bucket", _steps(report.buckets))
    if report.sampling:
        _print(console, "Sampling, after the graph", _steps(report.sampling))
    _print(console, "Operators", _operators(report.operators))
    if report.findings:
        _print(console, "Findings", _findings(report.findings))
    used = {key for use in report.operators if use.native is not None for key in use.native.sources}
    used |= {key for finding in report.findings for key in finding.shown_by}
    for key, source in native_sources().items():
        if key in used:
            console.print(f"{key}: {source}", style="dim", highlight=False)
    console.print()
    if report.violations:
        console.print(f"{len(report.violations)} forbidden", style="bold red", highlight=False)
    else:
        console.print("Nothing forbidden", style="bold", highlight=False)
    if report.unknown:
        console.print(f"{NOT_SHOWN}: {', '.join(report.unknown)}", style="yellow", highlight=False)
    console.print(_CAVEAT, style="dim", highlight=False)


def report_fields(report: AuditReport) -> dict[str, Any]:
    """The same as JSON values: bytes and counts."""
    from hpu_duo.lab.audit import native_sources

    return {
        "model": report.model,
        "weight_bytes": report.weight_bytes,
        "store_bytes": report.store_bytes,
        "num_blocks": report.num_blocks,
        "peak_transient_bytes": report.peak_transient_bytes,
        "num_layer_kinds": report.num_layer_kinds,
        "recipes": [_recipe_fields(recipe) for recipe in report.recipes],
        "buckets": [_step_fields(step) for step in report.buckets],
        "sampling": [_step_fields(step) for step in report.sampling],
        "operators": [_operator_fields(use) for use in report.operators],
        "sources": dict(native_sources()),
        "unknown": list(report.unknown),
        "violations": [_finding_fields(finding) for finding in report.violations],
        "notes": [_finding_fields(finding) for finding in report.notes],
        "is_measured_by_this_project": False,
    }


def _held(report: AuditReport) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("weights", show_bytes(report.weight_bytes))
    table.add_row("KV stores", f"{show_bytes(report.store_bytes)}, {report.num_blocks:,} blocks")
    table.add_row("a step needs", f"at most {show_bytes(report.peak_transient_bytes)} more, unfused")
    kinds = f"{report.num_layer_kinds} distinct layer{'s' if report.num_layer_kinds > 1 else ''}"
    table.add_row("compiled for each bucket", kinds)
    for recipe in report.recipes:
        table.add_row("layers (Kr, Ks)", _recipe(recipe))
    return table


def _recipe(recipe: LayerRecipe) -> str:
    window = recipe.window
    keeps = "" if window is None else f", which keep {window.sink} first and {window.recent} newest tokens"
    num_streaming = recipe.num_streaming - sum(group.num_heads for group in recipe.budgets)
    budgets = "".join(f", {group.num_heads} by {group.kind.describe()}" for group in recipe.budgets)
    return (
        f"{recipe.num_layers} x ({recipe.num_retrieval}, {recipe.num_streaming}): {recipe.num_retrieval} KV "
        f"heads retrieve, {num_streaming} stream{keeps}{budgets}"
    )


def _steps(steps: tuple[StepAudit, ...]) -> Table:
    from hpu_duo.lab.audit import Engine

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("step", no_wrap=True)
    for name in (
        "matrix GFLOP",
        "vector Gop",
        "moves",
        "all bytes",
        "operators",
        "region calls",
        "peak transient",
        "inputs",
    ):
        table.add_column(name, justify="right")
    for step in steps:
        parts = [step.on(engine) for engine in (Engine.MATRIX, Engine.VECTOR, Engine.MEMORY)]
        table.add_row(
            step.name,
            f"{parts[0].num_operations / 1e9:,.1f}",
            f"{parts[1].num_operations / 1e9:,.2f}",
            show_bytes(parts[2].num_bytes),
            show_bytes(sum(part.num_bytes for part in parts)),
            f"{sum(part.num_launches for part in parts):,}",
            f"{step.num_region_calls:,}",
            show_bytes(step.peak_transient_bytes),
            show_bytes(step.input_bytes),
        )
    return table


def _operators(uses: tuple[OperatorUse, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("operator")
    table.add_column("calls", justify="right")
    table.add_column("engine")
    table.add_column("shown by")
    for use in uses:
        native = use.native
        shown = ("", NOT_SHOWN) if native is None else (native.engine.value, ", ".join(native.sources))
        table.add_row(use.name, f"{use.num_calls:,}", *shown)
    return table


def _findings(findings: tuple[Finding, ...]) -> Table:
    from hpu_duo.lab.audit import Severity

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("severity", "rule", "operator", "what", "shown by", "where"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        shown_by = ", ".join(finding.shown_by)
        table.add_row(
            finding.severity.value,
            finding.rule.value,
            finding.operator,
            finding.detail,
            shown_by,
            finding.source,
            style="red" if finding.severity is Severity.FORBIDDEN else "",
        )
    return table


def _finding_fields(finding: Finding) -> dict[str, Any]:
    return {**asdict(finding), "rule": finding.rule.name, "severity": finding.severity.value}


def _step_fields(step: StepAudit) -> dict[str, Any]:
    return {
        "name": step.name,
        "work": {engine.value: asdict(work) for engine, work in step.work.items()},
        "operators": dict(step.operators),
        "peak_transient_bytes": step.peak_transient_bytes,
        "input_bytes": step.input_bytes,
        "num_region_calls": step.num_region_calls,
        "num_findings": len(step.findings),
    }


def _recipe_fields(recipe: LayerRecipe) -> dict[str, Any]:
    window = None if recipe.window is None else recipe.window._asdict()
    return {
        "num_retrieval": recipe.num_retrieval,
        "num_streaming": recipe.num_streaming,
        "window": window,
        "budgets": [
            {"num_heads": group.num_heads, "kept": group.kind.describe()} for group in recipe.budgets
        ],
        "num_layers": recipe.num_layers,
    }


def _operator_fields(use: OperatorUse) -> dict[str, Any]:
    native = use.native
    return {
        "name": use.name,
        "num_calls": use.num_calls,
        "engine": None if native is None else native.engine.value,
        "sources": [] if native is None else list(native.sources),
    }


def _print(console: Console, title: str, table: Table) -> None:
    # A title of the table itself would be wrapped to its width.
    console.print(title, style="bold", highlight=False)
    console.print(table)
    console.print()
