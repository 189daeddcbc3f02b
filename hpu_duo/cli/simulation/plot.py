"""Simulated runs as a picture: waiting and latency of requests, and service of users."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hpu_duo.lab.simulate.report import RunReport
    from hpu_duo.lab.simulate.run_log import RunLog

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
    return np.unique(np.linspace(0, num_points - 1, min(num_points, _MOST_POINTS)).astype(np.int64))


def _latencies(axes: Any, runs: Sequence[Run], name: str, label: str) -> None:
    """Shares of requests that took at most so long."""
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
