"""Views of an identification under way, and of its result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from hpu_duo.cli.terminal import can_show

if TYPE_CHECKING:
    from hpu_duo.heads import HeadPattern
    from hpu_duo.lab.identify import Progress

_SHADES, _PLAIN_SHADES = " ░▒▓█", " .:*#"
"""Characters from low to high scores; the second row is for encodings without the first."""
_LINES_WITHOUT_TERMINAL = 10


class IdentifyView:
    """A bar with the losses on a terminal, ten lines elsewhere, nothing when silent.

    Args:
        console: receives the output.
        total: steps or samples of the whole run.
        is_silent: for all processes but one.
    """

    def __init__(self, console: Console, total: int, is_silent: bool) -> None:
        self._console, self._total, self._is_silent = console, total, is_silent
        self._bar: Bar | None = None
        if console.is_terminal and not is_silent:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
            self._bar.add_task("", total=total)
            self._bar.start()

    def moved(self, progress: Progress) -> None:
        """Show the progress."""
        told = _losses(progress)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=progress.done, description=told)
        elif not self._is_silent:
            every = max(1, self._total // _LINES_WITHOUT_TERMINAL)
            if progress.done % every == 0 or progress.done == self._total:
                self._console.print(f"{progress.done} of {self._total}  {told}".rstrip(), highlight=False)

    def ended(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _losses(progress: Progress) -> str:
    losses = progress.losses
    if losses is None:
        return ""
    return f"loss {losses.total:.4g} = distance {losses.distillation:.4g} + weight x {losses.penalty:.4g}"


def heads_table(pattern: HeadPattern, cuts: dict[str, HeadPattern], console: Console) -> Table:
    """Scores of each layer as shades, and its retrieval heads in each named, binarised pattern."""
    levels, border = (_SHADES, "│") if can_show(_SHADES + "│", console) else (_PLAIN_SHADES, "|")
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("layer", justify="right")
    table.add_column("scores", no_wrap=True)
    for name in cuts:
        table.add_column(name, justify="right")
    for layer, scores in enumerate(pattern.scores):
        shades = "".join(levels[min(int(max(score, 0.0) * len(levels)), len(levels) - 1)] for score in scores)
        counts = [str(cut.head_counts[layer][0]) for cut in cuts.values()]
        table.add_row(str(layer), f"{border}{shades}{border}", *counts)
    table.add_section()
    totals = [f"{int(cut.mask.sum())}/{cut.mask.size}" for cut in cuts.values()]
    table.add_row("all", "", *totals)
    # Heads that share a latent save memory in such layers only, and reads everywhere.
    layers = [f"{_num_streaming_layers(cut)}/{cut.num_layers}" for cut in cuts.values()]
    table.add_row("layers", "without retrieval heads", *layers)
    return table


def _num_streaming_layers(cut: HeadPattern) -> int:
    return int((~cut.mask.any(axis=1)).sum())


def latent_savings(cuts: dict[str, HeadPattern]) -> list[str]:
    """Savings by streaming where the heads of a layer share latents, a sentence for each named cut."""
    return [
        f"{name}: {int((~cut.mask).sum())} of {cut.mask.size} heads stream and read less; "
        f"{_num_streaming_layers(cut)} of {cut.num_layers} layers have no other heads and store less"
        for name, cut in cuts.items()
    ]


def pattern_fields(pattern: HeadPattern, cuts: dict[str, HeadPattern]) -> dict[str, Any]:
    """The same as JSON values."""
    return {
        "num_layers": pattern.num_layers,
        "num_kv_heads": pattern.num_kv_heads,
        "sink": pattern.sink,
        "recent": pattern.recent,
        "scores": [[float(score) for score in row] for row in pattern.scores],
        "cuts": [
            {
                "name": name,
                "sparsity": cut.sparsity,
                "num_retrieval": int(cut.mask.sum()),
                "num_streaming_layers": _num_streaming_layers(cut),
                "retrieval_per_layer": [kept for kept, _ in cut.head_counts],
                "retrieval_heads": {
                    str(layer): [int(head) for head in row.nonzero()[0]]
                    for layer, row in enumerate(cut.mask)
                    if row.any()
                },
            }
            for name, cut in cuts.items()
        ],
    }


_CELL = 0.28
"""Size of a cell in inches; half of it for more than ``_MANY`` heads."""
_MANY = 16
_EFFORTS = {"num_steps": "steps", "n_samples": "documents", "num_orders": "orders"}


def draw_heads(patterns: Sequence[tuple[str, HeadPattern]], png: Path) -> None:
    """Write one map for each titled pattern, one above the other; retrieval heads of binarised ones framed.

    A title goes on with the steps, documents or orders that the scores come from, as far as the pattern's
    ``config`` says so.

    Equal patterns give equal files with one version of matplotlib.

    Raises:
        ValueError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [_cell(pattern) * pattern.num_kv_heads + 0.9 for _, pattern in patterns]
    width = max(_cell(pattern) * pattern.num_layers for _, pattern in patterns) + 2.2
    figure = Figure(figsize=(max(width, 4.2), sum(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(patterns), 1, squeeze=False, height_ratios=rows)[:, 0]
    for axes, (title, pattern) in zip(panels, patterns):
        image = _panel(axes, title, pattern)
    figure.colorbar(image, ax=list(panels), label="score", shrink=0.9)
    try:
        # Without the version of matplotlib, which says nothing about heads.
        figure.savefig(png, dpi=110, metadata={"Software": None})
    except OSError as error:
        raise ValueError(f"cannot write {png}: {error.strerror}") from error


def _cell(pattern: HeadPattern) -> float:
    return _CELL / 2 if pattern.num_kv_heads > _MANY else _CELL


def _panel(axes: Any, title: str, pattern: HeadPattern) -> Any:
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    image = axes.imshow(pattern.scores.T, vmin=0, vmax=1, cmap="viridis", origin="lower", aspect="auto")
    if pattern.retrieval is not None:
        for layer, head in zip(*pattern.retrieval.nonzero()):
            frame = Rectangle((layer - 0.5, head - 0.5), 1, 1, fill=False, edgecolor="#ff5a4f", linewidth=1.2)
            axes.add_patch(frame)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head")
    axes.set_title(title + effort(pattern), fontsize=10)
    return image


def effort(pattern: HeadPattern) -> str:
    """Return what its scores took, for a title: ``, 2,000 steps``; empty where ``config`` does not say."""
    found = ((pattern.config.get(key), what) for key, what in _EFFORTS.items())
    return "".join(f", {number:,} {what}" for number, what in found if isinstance(number, int))
