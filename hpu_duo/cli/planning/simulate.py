"""``hpu-duo simulate``: what a server would do with requests, on a virtual clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hpu_duo.cli.options import Json, Only, Seed, grouped
from hpu_duo.cli.planning.hardware import HardwareOptions
from hpu_duo.cli.planning.simulate_options import (
    Asked,
    MachineOptions,
    ReplicaOptions,
    RequestOptions,
    ServedLimits,
)
from hpu_duo.cli.terminal import check_drawing, show_bytes, user_errors
from hpu_duo.config.limits import SchedulerConfig
from hpu_duo.garbage import collector_paused
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from hpu_duo.lab.simulate.report import RunReport
    from hpu_duo.lab.simulate.run_log import OffloadFigures, RunLog
    from hpu_duo.lab.simulate.server import SimulatedServer

FORMAT = "hpu-duo simulate 1"

# Contexts to compare are another command's.
_PRICED = Only(
    *("devices", "dtype", "sparsity", "kv_cache_dtype", "pattern", "max_layer_kinds", "sink", "recent"),
    *("attention", "device_memory_utilization", "graph_memory"),
)


@grouped
@collector_paused()
def simulate(
    *,
    machine: MachineOptions,
    served: Annotated[HardwareOptions, _PRICED],
    limits: ServedLimits,
    asked: RequestOptions,
    replicated: ReplicaOptions,
    scheduling_policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            help="Policies to run side by side; docs/scheduling.md has them.",
            show_default=SchedulerConfig.scheduling_policy,
        ),
    ] = None,
    until: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Begin no step later.", show_default="until all requests have ended"
        ),
    ] = None,
    percentiles: Annotated[
        list[float] | None, typer.Option(help="Percentiles of every metric.", show_default="50 99")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the result as JSON.", show_default="not written"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also draw it, as SVG or PNG by the name; needs matplotlib.",
            show_default="no picture",
        ),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Serve requests with the real scheduler on a virtual clock, under one policy or several.

    Nothing is computed: steps take the time that the cost model of Gaudi predicts, or that hpu-duo bench
    steps measured. Scheduler, prefix cache and buckets are the engine's own.
    """
    policies = scheduling_policy or [SchedulerConfig.scheduling_policy]
    with user_errors():
        chosen = tuple(percentiles or (50.0, 99.0))
        _check(policies, chosen, until, asked.ranker)
        forecast = asked.forecast
        fleets = replicated.fleets
        if limits.kv_offloading_size is not None and fleets != [None]:
            raise ValueError("expected --kv-offloading-size without --replicas")
        if out is not None:
            check_file("--out", out)
        if plot is not None:
            check_drawing(plot, "--plot", SUFFIXES)
        server = limits.on(machine, served)
        requests = asked.sessions(server.max_request_len, seed)
    runs: list[tuple[RunReport, RunLog]] = []
    with user_errors(()):
        from hpu_duo.lab.simulate.report import RunReport

        for fleet, policy in product(fleets, policies):
            settings: dict[str, Any] = {
                "seed": seed,
                "forecast": forecast,
                "until_s": float("inf") if until is None else until,
            }
            if fleet is None:
                log, figures = server.run(policy, requests.sessions, **settings), None
            else:
                log, figures = fleet.run(server, policy, requests.sessions, **settings)
            runs.append((RunReport.of(policy, log, chosen, figures), log))
    fields = _fields(server, requests, [report for report, _ in runs], seed, asked)
    if out is not None:
        out.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        with user_errors():
            draw(runs, _title(requests), plot)
    if as_json:
        typer.echo(json.dumps(fields, indent=2))
    else:
        _show(requests, [report for report, _ in runs])


def _check(
    policies: list[str], percentiles: tuple[float, ...], until: float | None, ranker: Path | None
) -> None:
    from hpu_duo.scheduling import make_policy

    made = [make_policy(policy) for policy in policies]
    if ranker is not None and not any(policy.needs_scores for policy in made):
        raise ValueError(f"expected --ranker with a policy that needs one, ltr, got {' '.join(policies)}")
    if len(set(policies)) < len(policies):
        raise ValueError(f"expected different policies, got {' '.join(policies)}")
    if any(not 0 <= one <= 100 for one in percentiles):
        raise ValueError(f"expected --percentiles from 0 to 100, got {list(percentiles)}")
    if until is not None and not until > 0:
        raise ValueError(f"expected --until above 0, got {until}")


def _fields(
    server: SimulatedServer, kept: Asked, reports: list[RunReport], seed: int, asked: RequestOptions
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        **kept.settings,
        "seed": seed,
        "length_error": asked.length_error,
        "ranker": None if asked.ranker is None else asked.ranker.name,
        "left_out": kept.num_left_out,
        "step_times": server.source,
        "limits": asdict(server.limits),
        "num_buckets": 0 if server.table is None else len(server.table),
        "runs": [report.as_json() for report in reports],
    }


def _title(asked: Asked) -> str:
    return ", ".join(f"{name} {value}" for name, value in asked.settings.items() if value is not None)


def _show(asked: Asked, reports: list[RunReport]) -> None:

    console = Console()
    console.print(run_table(reports))
    notes = Console(stderr=True)
    if asked.num_left_out:
        notes.print(f"note: {asked.num_left_out:,} requests were left out: the server cannot hold them")
    for report in reports:
        if report.num_completed < report.num_requests:
            missing = report.num_requests - report.num_completed
            notes.print(
                f"note: {report.title}: {missing:,} requests did not end; times are of those that did"
            )


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
        *_of_host(first),
        *_of_replicas(first),
        ("padding by cost", lambda run: f"{run.padding:.1%}"),
        ("steps", lambda run: f"{run.num_steps:,}"),
        ("busy", lambda run: f"{run.busy_share:.1%}"),
    ]
    if len(first.fairness.service) > 1:
        lines.append(("largest difference of service", lambda run: f"{run.fairness.largest_difference:,.0f}"))
    return lines


def _of_host(first: RunReport) -> list[tuple[str, _Cell]]:
    if first.offload is None:
        return []

    def cell(text: Callable[[OffloadFigures, RunReport], str]) -> _Cell:
        return lambda run: "" if run.offload is None else text(run.offload, run)

    def share(num_tokens: int, run: RunReport) -> str:
        return f"{num_tokens / max(1, run.num_looked_up_tokens):.1%}"

    lines = [
        ("  of them from the host", cell(lambda each, run: share(each.num_hit_tokens, run))),
        ("to the host", cell(lambda each, _: show_bytes(each.stored_bytes))),
        ("from the host", cell(lambda each, _: show_bytes(each.loaded_bytes))),
    ]
    if first.offload.disk_written_bytes:
        on_disk = cell(lambda each, run: share(each.num_disk_hit_tokens, run))
        lines.insert(1, ("    of them read from the disk before", on_disk))
        lines.append(("to the disk", cell(lambda each, _: show_bytes(each.disk_written_bytes))))
        lines.append(("from the disk", cell(lambda each, _: show_bytes(each.disk_read_bytes))))
    if first.offload.num_swapped or first.offload.num_recomputed:
        lines.append(("swapped preemptions", cell(lambda each, _: f"{each.num_swapped:,}")))
    return [*lines, ("stalled by the link", cell(lambda each, _: f"{each.stalled_s:,.1f} s"))]


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


COLOURS = ("#4d4d4d", "#1b6ca8", "#d1495b", "#2e8b57", "#8e5ea2", "#c58b00")
LINES = ("-", "--", ":")
SUFFIXES = (".svg", ".png")
_MOST_POINTS = 240
"""Of a line; a picture then has a size that does not depend on the number of requests."""

Run = tuple["RunReport", "RunLog"]


def draw(runs: Sequence[Run], title: str, file: Path) -> None:
    """Write the picture, a line for each policy; PNG or SVG by the name of the file.

    Raises:
        ValueError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    _latencies(panels[0][0], runs, "ttft", "time to first token, s")
    _latencies(panels[0][1], runs, "latency_per_token", "end to end per output token, s")
    _waiting(panels[1][0], runs)
    _differences(panels[1][1], runs)
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=6
    )
    figure.suptitle(title, fontsize=11)
    try:
        # The same run gives the same file: no date, no random names.
        with matplotlib.rc_context({"svg.hashsalt": "hpu-duo"}):
            figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
    except OSError as error:
        raise ValueError(f"cannot write {file}: {error.strerror}") from error


def _style(place: int) -> dict[str, Any]:
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": LINES[place // len(COLOURS) % len(LINES)],
        "linewidth": 1.4,
    }


def _spread(num_points: int) -> npt.NDArray[np.int64]:
    """Indices of the points to draw, first and last among them; more would be narrower than a line."""
    import numpy as np

    return np.unique(np.linspace(0, num_points - 1, min(num_points, _MOST_POINTS)).astype(np.int64))


def _latencies(axes: Any, runs: Sequence[Run], name: str, label: str) -> None:
    """Shares of requests that took at most so long."""
    import numpy as np

    for place, (report, log) in enumerate(runs):
        found = [getattr(each, name) for each in log.records.values() if each.ended is not None]
        values = np.sort([each for each in found if each is not None])
        if len(values):
            ranks = _spread(len(values))
            axes.step(values[ranks], (ranks + 1) / len(values), label=report.title, **_style(place))
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("share of requests")
    axes.grid(alpha=0.3)


def _waiting(axes: Any, runs: Sequence[Run]) -> None:
    """Requests that have come and not started, over time."""
    import numpy as np

    for place, (_, log) in enumerate(runs):
        times = np.linspace(0, log.end, _MOST_POINTS)
        records = log.records.values()
        came = np.sort([each.arrived for each in records])
        started = np.sort([each.started for each in records if each.started is not None])
        num_waiting = np.searchsorted(came, times, "right") - np.searchsorted(started, times, "right")
        axes.plot(times, num_waiting, **_style(place))
    axes.set_xlabel("time, s")
    axes.set_ylabel("requests that wait")
    axes.grid(alpha=0.3)


def _differences(axes: Any, runs: Sequence[Run]) -> None:
    """Largest difference of service so far."""
    for place, (report, _) in enumerate(runs):
        growth = report.fairness.growth
        axes.plot(*zip(*(growth[number] for number in _spread(len(growth)))), **_style(place))
    axes.set_xlabel("time, s")
    axes.set_ylabel("largest difference of service so far")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(alpha=0.3)
