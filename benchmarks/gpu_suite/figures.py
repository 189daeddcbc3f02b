"""Figures of the DuoAttention curves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.gpu_suite.memory import DUO, FULL
from benchmarks.gpu_suite.report import bytes_of, time_of
from benchmarks.gpu_suite.results import Point, Results
from benchmarks.gpu_suite.shapes import ModelShape, Sizes

_STYLE = {FULL: ("tab:gray", "o"), DUO: ("tab:blue", "s")}


def draw_figures(results: Results, sizes: Sizes, stem: Path) -> list[Path]:
    """Latency and memory of both systems, one figure each for decode and prefill.

    Args:
        stem: files are named after it.
    Returns:
        the files written; none for a section without measurements.
    """
    written = []
    for section, axis, unit in (("decode", "context", "ms"), ("prefill", "chunk", "s")):
        if not any(point.is_measured for point in results.of(section)):
            continue
        path = stem.with_name(f"{stem.name}-{section}.png")
        _draw(results, sizes, section, axis, unit, path)
        written.append(path)
    return written


def _draw(results: Results, sizes: Sizes, section: str, axis: str, unit: str, path: Path) -> None:
    figure, axes = plt.subplots(2, len(sizes.models), figsize=(5 * len(sizes.models), 7), squeeze=False)
    factor = 1e3 if unit == "ms" else 1.0
    for column, model in enumerate(sizes.models):
        latency, memory = axes[0][column], axes[1][column]
        _plot(latency, results, section, model, axis, lambda point: time_of(point) * factor)
        _plot(memory, results, section, model, axis, lambda point: bytes_of(point) / (1 << 30))
        latency.set_title(f"{model.name}, {model.retrieval_share:.0%} retrieval heads")
        latency.set_ylabel(f"{section} latency [{unit}]")
        memory.set_ylabel("memory [GiB]")
        memory.set_xlabel(f"{axis} [tokens]")
    device = results.environment["device"]
    toy = ", toy sizes: says nothing about speed" if results.environment.get("sizes") == "toy" else ""
    figure.suptitle(f"{section}: {FULL} and {DUO} on {device}{toy}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plot(
    axes: Axes,
    results: Results,
    section: str,
    model: ModelShape,
    axis: str,
    of: Callable[[Point], float],
) -> None:
    for system, (colour, marker) in _STYLE.items():
        points = [
            point
            for point in results.of(section)
            if point.is_measured and point.key.system == system and point.key.case.startswith(model.name)
        ]
        points.sort(key=lambda point: point.values[axis])
        axes.plot(
            [point.values[axis] for point in points],
            [of(point) for point in points],
            color=colour,
            marker=marker,
            label=system,
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
