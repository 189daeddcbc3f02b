"""Scores of KV heads as a heat map: layers across, heads up, as figure 4 of the DuoAttention paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpu_duo.heads import HeadPattern

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
