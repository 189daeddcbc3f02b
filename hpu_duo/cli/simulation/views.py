"""Simulated runs on the terminal: a column for each policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from hpu_duo.simulate.report import RunReport

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "e2el": "end to end",
    "latency_per_token": "end to end per output token",
}
_Cell = Callable[["RunReport"], str]


def run_table(reports: Sequence[RunReport]) -> Table:
    """Lay policies out side by side, a metric in each line."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", style="dim")
    for report in reports:
        table.add_column(report.title, justify="right")
    for name, cell in _lines(reports[0]):
        table.add_row(name, *map(cell, reports))
    return table


def _lines(first: RunReport) -> list[tuple[str, _Cell]]:
    """Names and contents of the lines; those of users only where there are several."""
    lines: list[tuple[str, _Cell]] = [
        ("requests completed", lambda run: f"{run.num_completed:,} of {run.num_requests:,}"),
        ("duration", lambda run: f"{run.duration_s:,.1f} s"),
        ("requests/s", lambda run: f"{run.requests_per_s:,.2f}"),
        ("output tokens/s", lambda run: f"{run.output_tokens_per_s:,.1f}"),
    ]
    percentiles = [at for at, _ in first.metrics["ttft"].percentiles]
    for key, name in _NAMES.items():
        lines.append((f"{name}, mean", _mean(key)))
        lines += [(f"  p{at:g}", _percentile(key, place)) for place, at in enumerate(percentiles)]
    lines += [
        ("longest wait to start", lambda run: f"{run.longest_wait_s:,.1f} s"),
        ("preemptions", lambda run: f"{run.num_preemptions:,}"),
        ("prefix hits", lambda run: f"{run.hit_rate:.1%}"),
        *_of_replicas(first),
        ("padding by cost", lambda run: f"{run.padding:.1%}"),
        ("steps", lambda run: f"{run.num_steps:,}"),
        ("busy", lambda run: f"{run.busy_share:.1%}"),
    ]
    if len(first.fairness.service) > 1:
        lines.append(("largest difference of service", lambda run: f"{run.fairness.largest_difference:,.0f}"))
    return lines


def _of_replicas(first: RunReport) -> list[tuple[str, _Cell]]:
    if first.replicas is None:
        return []
    return [
        (
            "  expected by the router",
            lambda run: f"{run.replicas.expected_hit_rate:.1%}" if run.replicas else "",
        ),
        ("requests sent again", lambda run: f"{run.replicas.num_lost:,}" if run.replicas else ""),
    ]


def _mean(key: str) -> _Cell:
    return lambda run: _shown(run, key, run.metrics[key].mean)


def _percentile(key: str, place: int) -> _Cell:
    return lambda run: _shown(run, key, run.metrics[key].percentiles[place][1])


def _shown(run: RunReport, key: str, milliseconds: float) -> str:
    return f"{milliseconds:,.1f} ms" if run.metrics[key].num else "-"
