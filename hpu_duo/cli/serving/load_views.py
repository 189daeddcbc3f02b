"""A run of ``hpu-duo bench serve`` on the terminal: progress, the result, and what to mind."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from hpu_duo.load import LoadRun, Outcome, Summary

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
}
_BUSY_SHARE = 0.8
_LATE_MS = 50.0
_MOST_ERRORS = 5


class LoadProgress(AbstractContextManager["LoadProgress"]):
    """A bar of requests that have ended; drawn where the console is a terminal."""

    def __init__(self, console: Console, total: int) -> None:
        self._bar = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            # Drawing takes time from the client it shows.
            refresh_per_second=2,
        )
        self._task = self._bar.add_task("requests", total=total, failed="")
        self._num_failed = 0

    def __enter__(self) -> LoadProgress:
        """Draw it."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it away."""
        self._bar.stop()

    def ended(self, outcome: Outcome) -> None:
        """Count a request that has ended."""
        self._num_failed += not outcome.is_whole
        failed = f"{self._num_failed:,} failed" if self._num_failed else ""
        self._bar.update(self._task, advance=1, failed=failed)


def print_summary(console: Console, summary: Summary) -> None:
    """Print throughput and latencies."""
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(style="dim")
    facts.add_column(justify="right")
    rows = [
        ("requests completed", f"{summary.num_completed:,}"),
        ("requests failed", f"{summary.num_failed:,}"),
        ("duration", f"{summary.duration_s:,.2f} s"),
        ("prompt tokens", f"{summary.num_prompt_tokens:,}"),
        ("output tokens", f"{summary.num_output_tokens:,}"),
        ("requests/s", f"{summary.requests_per_s:,.2f}"),
        ("output tokens/s", f"{summary.output_tokens_per_s:,.2f}"),
        ("tokens/s of prompts and outputs", f"{summary.tokens_per_s:,.2f}"),
        ("most output tokens in a second", f"{summary.peak_output_tokens:,}"),
        ("most requests at once", f"{summary.peak_concurrency:,}"),
    ]
    if summary.goodput_per_s is not None:
        rows.append(("requests/s within all goals", f"{summary.goodput_per_s:,.2f}"))
    for name, value in rows:
        facts.add_row(name, value)
    console.print(facts)
    console.print()
    times = Table(box=None, padding=(0, 2, 0, 0))
    times.add_column("milliseconds", style="dim")
    percentiles = [f"p{at:g}" for at, _ in summary.metrics["ttft"].percentiles]
    for name in ("mean", "median", "std", *percentiles):
        times.add_column(name, justify="right")
    for key, metric in summary.metrics.items():
        values = (metric.mean, metric.median, metric.std, *(value for _, value in metric.percentiles))
        cells = [f"{value:,.2f}" if metric.num else "-" for value in values]
        times.add_row(_NAMES[key], *cells)
    console.print(times)


def notes(run: LoadRun, summary: Summary, *, is_open: bool) -> list[str]:
    """Sentences on failures, and on a client that was the limit itself.

    Args:
        is_open: whether requests were to leave at their times.
    """
    found = [f"{count:,} failed: {kind}" for kind, count in sorted(summary.failures.items())]
    errors = Counter(each.error for each in run.outcomes if not each.is_whole and each.error)
    found += [f"{error} ({count:,} times)" for error, count in errors.most_common(_MOST_ERRORS)]
    if summary.num_counted_by_events:
        found.append(
            f"the server did not count the tokens of {summary.num_counted_by_events:,} answers: events were "
            "taken for tokens"
        )
    if run.cpu_share > _BUSY_SHARE:
        found.append(
            f"this client was busy for {run.cpu_share:.0%} of the time: its own work is part of the latencies"
        )
    if is_open and summary.lag.num and summary.lag.mean > _LATE_MS:
        found.append(
            f"requests were sent {summary.lag.mean:,.0f} ms late on average: the client is overloaded"
        )
    return found
