"""Requests that fit and tokens per second against context, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpu_duo.planning import Capacity, CapacityPoint, ModelSize, Serving

_COLOURS = ("#4d4d4d", "#1b6ca8", "#d1495b", "#2e8b57", "#8e5ea2", "#c58b00")
_LINES = ("-", "--", ":", "-.")


def draw(model: ModelSize, serving: Serving, found: Sequence[Capacity], png: Path) -> None:
    """Write the picture: colours are sparsities, line styles are KV formats.

    Raises:
        ValueError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    # Nothing is drawn where no request fits: a logarithmic axis has no zero.
    _panel(left, "Requests that fit at once", found, lambda point: point.num_requests or None)
    title = f"Decode tokens/s of all requests (at most {serving.max_num_seqs})"
    _panel(right, title, found, lambda point: point.tokens_per_s)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(
        f"{model.name}, {serving.weights.value} weights, {serving.num_devices} x {serving.hardware.title}"
    )
    figure.supxlabel(
        "tokens of context per request\n"
        "predicted from public sources; this project has not measured any Gaudi",
        fontsize=9,
    )
    try:
        figure.savefig(png, dpi=120)
    except OSError as error:
        raise ValueError(f"cannot write {png}: {error.strerror}") from error


def _panel(
    axes: Any, title: str, found: Sequence[Capacity], value: Callable[[CapacityPoint], float | None]
) -> None:
    from matplotlib.ticker import LogLocator

    sparsities = list(dict.fromkeys(each.sparsity for each in found))
    formats = list(dict.fromkeys(each.kv_format for each in found))
    for each in found:
        drawn = [(point.context, y) for point in each.points if (y := value(point)) is not None]
        what = "full attention" if each.sparsity == 0 else f"{each.sparsity:.0%} of heads stream"
        axes.plot(
            [x for x, _ in drawn],
            [y for _, y in drawn],
            color=_COLOURS[sparsities.index(each.sparsity) % len(_COLOURS)],
            linestyle=_LINES[formats.index(each.kv_format) % len(_LINES)],
            marker="o",
            markersize=4,
            label=f"{what}, {each.kv_format.value} KV",
        )
    contexts = sorted({point.context for each in found for point in each.points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [_short(context) for context in contexts])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}" if y >= 1 else "")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)


def _short(context: int) -> str:
    return f"{context // 1024}K" if context % 1024 == 0 else f"{context:,}"
