"""Heat map of a needle grid, and accuracy against KV budget, as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = (
    *("#1b6ca8", "#2e8b57", "#8e5ea2", "#c58b00", "#00798c"),
    *("#a44200", "#d16ba5", "#7a5195", "#6b8e23", "#5c4033", "#264653"),
)
_FIXED = {"full attention": "#4d4d4d", "all streaming": "#d1495b", "random heads": "#9a9a9a"}
MARKERS = "osD^vPX*<>h"
BAR = {"elinewidth": 0.8, "capsize": 2}

Row = Mapping[str, Any]


def draw_grid(cells: Sequence[Row], png: Path) -> None:
    """Write a heat map of the accuracy with its 95 % intervals: lengths to the right, depths down.

    Raises:
        ResultsNotWrittenError: the file cannot be written.
    """
    lengths = sorted({cell["num_tokens"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    found = {(cell["depth"], cell["num_tokens"]): cell for cell in cells}
    figure = new_figure((2.2 + 0.8 * len(lengths), 1.8 + 0.5 * len(depths)))
    axes = figure.subplots()
    values = [[found[depth, length]["accuracy"] for length in lengths] for depth in depths]
    image = axes.imshow(values, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            cell = found[depth, length]
            text = f"{cell['num_exact']}/{cell['num_answers']}\n"
            text += f"{cell['accuracy_low']:.2f} to {cell['accuracy_high']:.2f}"
            # Both ends of the colours are dark.
            colour = "black" if 0.1 < cell["accuracy"] < 0.9 else "white"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("tokens of the document")
    axes.set_ylabel("depth of the needle")
    axes.set_title("exact answers, 95 % intervals", fontsize=10)
    figure.colorbar(image, label="share of exact answers")
    save(figure, png)


def draw_curve(rows: Sequence[Row], png: Path) -> None:
    """Write accuracy against bytes kept, and one panel for each sweep of the window.

    Lines are means over seeds, bands reach from the worst to the best of them, bars are 95 % intervals of the
    mean for the number of questions.

    Raises:
        ResultsNotWrittenError: the file cannot be written.
    """
    sweeps = [name for name in ("sink", "recent") if any(row["sweep"] == name for row in rows)]
    figure = new_figure((7 + 4 * len(sweeps), 4.6))
    panels = figure.subplots(1, 1 + len(sweeps), squeeze=False)[0]
    _budget_panel(panels[0], [row for row in rows if row["sweep"] == "share"])
    for axes, sweep in zip(panels[1:], sweeps):
        found = sorted((row for row in rows if row["sweep"] == sweep), key=lambda row: row[sweep])
        values = [row[sweep] for row in found]
        axes.errorbar(values, _accuracies(found), _bars(found), fmt="o-", color=COLOURS[0], **BAR)
        axes.set_xlabel(f"{sweep} tokens of streaming heads")
        axes.set_title(f"{found[0]['retrieval_share']:.0%} retrieval heads", fontsize=10)
        _accuracy_axis(axes)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    save(figure, png)


def _budget_panel(axes: Any, rows: Sequence[Row]) -> None:
    labels = list(dict.fromkeys(row["label"] for row in rows))
    colours = iter(COLOURS * len(labels))
    for number, label in enumerate(labels):
        found = sorted((row for row in rows if row["label"] == label), key=lambda row: row["kv_ratio"])
        kept = [row["kv_ratio"] for row in found]
        colour = _FIXED.get(label) or next(colours)
        seeds = max(row["num_seeds"] for row in found)
        name = f"{label} ({seeds} seeds)" if seeds > 1 else label
        line = MARKERS[number % len(MARKERS)] + "-"
        axes.errorbar(
            kept, _accuracies(found), _bars(found), fmt=line, color=colour, label=name, alpha=0.85, **BAR
        )
        if seeds > 1:
            low, high = ([row[end] for row in found] for end in ("accuracy_min", "accuracy_max"))
            axes.fill_between(kept, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("KV bytes kept / bytes of the full cache")
    num_questions = min(row["num_questions"] for row in rows)
    axes.set_title(f"which heads to keep ({num_questions} questions, bars: 95 % intervals)", fontsize=10)
    _accuracy_axis(axes)


def _accuracies(rows: Sequence[Row]) -> list[float]:
    return [row["accuracy"] for row in rows]


def _bars(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Lengths of the error bars below and above the accuracies."""
    return (
        [row["accuracy"] - row["accuracy_low"] for row in rows],
        [row["accuracy_high"] - row["accuracy"] for row in rows],
    )


def _accuracy_axis(axes: Any) -> None:
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("exact answers")
    axes.grid(alpha=0.3)


def new_figure(size: tuple[float, float]) -> Any:
    """An empty figure of a size in inches, for files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, png: Path) -> None:
    """Write a figure.

    Raises:
        ResultsNotWrittenError: the file cannot be written.
    """
    from hpu_duo.lab.eval import ResultsNotWrittenError

    try:
        png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=120)
    except OSError as error:
        raise ResultsNotWrittenError(f"cannot write the picture {png}: {error.strerror}") from error


_TITLES = {
    "passkey": "passkeys",
    "rehearsed": "passkeys asked for before",
    "perplexity": "perplexity (lower is better)",
    "ruler": "RULER's tasks, our texts",
}
_LABELS = {"perplexity": "perplexity", "passkey": "exact answers", "rehearsed": "exact answers"}
_WIDEST, _NARROWEST = 5.0, 1.2
"""Widths of the first line and of the last one: a line that lies under another one shows at its edges."""


def draw_policies(rows: Sequence[Mapping[str, Any]], png: Path) -> None:
    """Write values against bytes held; bars are 95 % intervals, full attention is a level line.

    Lines get narrower from the first to the last, so that those with the same values are all seen.

    Raises:
        ResultsNotWrittenError: the file cannot be written.
    """
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    policies = sorted(dict.fromkeys(row["policy"] for row in rows), key=lambda policy: policy == "full")
    figure = new_figure((1.0 + 4.4 * len(tasks), 4.6))
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        for number, policy in enumerate(policies):
            found = [row for row in rows if row["task"] == task and row["policy"] == policy]
            found.sort(key=lambda row: row["kv_ratio"])
            values = [row["value"] for row in found]
            colour = COLOURS[number % len(COLOURS)]
            if policy == "full":
                axes.axhline(values[0], color="#4d4d4d", linestyle="--", label="full attention")
                continue
            bars = (
                [row["value"] - row["value_low"] for row in found],
                [row["value_high"] - row["value"] for row in found],
            )
            line = MARKERS[number % len(MARKERS)] + "-"
            kept = [row["kv_ratio"] for row in found]
            width = _WIDEST - (_WIDEST - _NARROWEST) * number / max(1, len(policies) - 1)
            style = {"linewidth": width, "markersize": 4 + width, "zorder": 2 + number / len(policies)}
            axes.errorbar(kept, values, bars, fmt=line, color=colour, label=policy, **style, **BAR)
        axes.set_xlabel("KV bytes kept / bytes of the full cache")
        axes.set_ylabel(_LABELS.get(task, "score"))
        axes.set_title(_TITLES.get(task, task), fontsize=10)
        axes.grid(alpha=0.3)
        if task != "perplexity":
            axes.set_ylim(-0.03, 1.03)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    save(figure, png)
