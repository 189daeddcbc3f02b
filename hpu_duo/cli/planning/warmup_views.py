"""Views of a warm-up: the estimate, a progress bar, and what it cost."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from graphs.manifest import GraphRecord
from hpu_duo.cli.terminal.sizes import show_bytes
from hpu_duo.startup.warm_up import WarmUp, WarmUpReport
from hpu_duo.startup.warm_up_estimate import Estimate

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
    table.add_row(
        "memory",
        f"{show_bytes(estimate.kept_bytes)} kept by graphs, {_source(estimate, _SIZES)}; "
        f"{show_bytes(estimate.transient_bytes)} while the largest step runs, {_SIZES}",
    )
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
    console.print(f"{report.num_captured} graphs captured in {report.seconds:.1f} s", highlight=False)


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
        "seconds": report.seconds,
        "graphs": [
            {"shape": str(record.shape), "seconds": record.seconds, "bytes": record.num_bytes}
            for record in report.records
        ],
        "notes": list(report.notes),
    }


def _described(record: GraphRecord) -> str:
    return str(record.shape) if record.seconds is None else f"{record.shape} {record.seconds:.1f} s"


def _seconds(estimate: Estimate) -> str:
    low, high = estimate.low_s, estimate.high_s
    if high < 60:
        return f"{low:.1f} to {high:.1f} s"
    return f"{low / 60:.1f} to {high / 60:.1f} min"


def _source(estimate: Estimate, unmeasured: str) -> str:
    if not estimate.num_measured:
        return unmeasured
    if estimate.num_measured == len(estimate.graphs):
        return "as measured before"
    return f"{estimate.num_measured} measured before, the others {unmeasured}"
