"""Kept positions as a picture: the text across, the heads of each layer up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpu_duo.engine.kept_tokens import KeptTokens

_KEPT, _PROMPT_END = "#1b6ca8", "#d1495b"
_ROW_INCHES = 0.12
_MOST_INCHES = 40.0


def draw_kept(kept: KeptTokens, num_prompt_tokens: int, file: Path) -> None:
    """Write the picture, a row for each head and a line where the prompt ends; PNG or SVG by the name.

    Equal results give equal files with one version of matplotlib.

    Raises:
        ValueError: the file cannot be written.
    """
    import matplotlib
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    rows = [head for heads in kept.layers for head in heads]
    held = np.zeros((len(rows), kept.num_tokens), dtype=np.uint8)
    for row, head in zip(held, rows):
        row[head.positions] = 1
    height = min(_MOST_INCHES, max(2.2, _ROW_INCHES * len(rows) + 1.2))
    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.imshow(
        held,
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap(["white", _KEPT]),
        vmin=0,
        vmax=1,
    )
    axes.axvline(num_prompt_tokens - 0.5, color=_PROMPT_END, linewidth=1.0, label="end of the prompt")
    starts = np.cumsum([0, *(len(heads) for heads in kept.layers)])
    for start in starts[1:-1]:
        axes.axhline(start - 0.5, color="#b0b0b0", linewidth=0.6)
    axes.set_yticks((starts[:-1] + starts[1:] - 1) / 2, [str(layer) for layer in range(len(kept.layers))])
    axes.set_ylabel("layer, and its KV heads from the top")
    axes.set_xlabel("position")
    axes.set_title(f"positions kept of {kept.num_tokens:,} tokens", fontsize=10)
    axes.legend(loc="upper right", fontsize=8)
    try:
        # The same result gives the same file: no date, no random names.
        with matplotlib.rc_context({"svg.hashsalt": "hpu-duo"}):
            metadata = {"Date": None} if file.suffix.lower() == ".svg" else {"Software": None}
            figure.savefig(file, dpi=110, metadata=metadata)
    except OSError as error:
        raise ValueError(f"cannot write {file}: {error.strerror}") from error
