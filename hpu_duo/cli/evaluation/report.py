"""The run of an evaluation, and its result as tables, pictures and JSON: accuracy beside bytes stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hpu_duo.cli.terminal import show_bytes, user_errors
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.lab.eval import PasskeyResult, PasskeyTask, Subject


REPORT = "report.json"
RESULTS = "results.jsonl"


KV_COLUMNS = ("kv_num_tokens", "held_bytes", "kv_ratio")
"""Columns of tokens and bytes in the cache, as means over the texts of a row."""
NOTE = (
    "In brackets: 95 % intervals (Wilson). KV: tokens of a text with its answer, bytes kept of them, and "
    "their share of the bytes of full attention; means over the texts of the line."
)
"""Below a table, of its columns."""
_SHARES = ("kv_ratio", "retrieval_share")


def show(rows: Sequence[Mapping[str, Any]], columns: Iterable[str], note: str = NOTE) -> None:
    """Print one line per row, each share with its interval where the row has one, and a note below."""
    console = Console()
    if not console.is_terminal:
        # A pipe cannot be widened by hand, and takes long lines rather than numbers that are cut off.
        console.width = max(console.width, 200)
    table = Table(box=None, padding=(0, 2, 0, 0))
    names = list(columns)
    for name in names:
        table.add_column(
            name.replace("_", " "), justify="left" if isinstance(rows[0][name], str) else "right"
        )
    for row in rows:
        table.add_row(*(_cell(row, name) for name in names))
    console.print(table)
    console.print(f"\n{note}", soft_wrap=True)


def finish(report: Mapping[str, Any], out: Path | None, as_json: bool) -> None:
    """Print the report as JSON if asked, and write it beside the results.

    Raises:
        ResultsNotWrittenError: it cannot be written.
    """
    text = json.dumps(report, indent=2)
    if as_json:
        typer.echo(text)
    if out is not None:
        write_text(out / REPORT, text + "\n")


def check_outputs(results: Path, derived: Sequence[Path]) -> None:
    """Refuse to replace files that are not from an earlier run of this evaluation.

    Raises:
        ValueError: there are derived files without the results, or a file cannot be written.
    """
    from hpu_duo.lab.eval.result_file import refuse_existing

    if not results.exists():
        refuse_existing(derived)
    for file in (results, *derived):
        check_file("results", file, makes_parents=True)


def write_text(path: Path, text: str) -> None:
    """Write a file at once, so that a kill leaves the old one or the new one.

    Raises:
        ResultsNotWrittenError: it cannot be written.
    """
    from graphs.atomic_file import replace_file
    from hpu_duo.lab.eval import ResultsNotWrittenError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise ResultsNotWrittenError(f"cannot write {path}: {error.strerror}") from error


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if value is None:
        return "-"
    if f"{name}_low" in row:
        return f"{value:.3f} ({row[f'{name}_low']:.3f} to {row[f'{name}_high']:.3f})"
    if name.endswith("_bytes"):
        return show_bytes(value)
    if name.endswith(_SHARES):
        return f"{value:.1%}"
    if name.endswith("num_tokens") or isinstance(value, int):
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


SimulatedDecodes = Annotated[
    int,
    typer.Option(
        metavar="N",
        help=("Last tokens of each prompt that are decoded one by one; 50 in DuoAttention's LongBench runs."),
    ),
]
ChatTemplate = Annotated[
    bool, typer.Option("--chat-template", help="Wrap prompts in the model's chat template.")
]
Limit = Annotated[
    int | None,
    typer.Option(help="Use only the first questions of each file.", show_default="all of them"),
]


def check_simulated_decodes(num_decoded: int) -> None:
    """Refuse a number of simulated decodes that is not at least 1, the default."""
    if num_decoded < 1:
        raise ValueError(f"expected --simulated-decodes of at least 1, got {num_decoded}")


def limited(items: Sequence[Any], limit: int | None) -> Sequence[Any]:
    """The first items; all of them without a limit.

    Raises:
        ValueError: the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"expected --limit of at least 1, got {limit}")
    return items[:limit]


def ask_full_attention(
    measured: Mapping[int, PasskeyResult],
    tasks: Mapping[int, Sequence[PasskeyTask]],
    load: Callable[[], Subject] | None,
) -> list[dict[str, Any]]:
    """Rows of full attention for lengths at which most answers were wrong, and a warning where it fails too.

    Args:
        measured, tasks, load: see ``hpu_duo.lab.eval.passkey.full_attention``.
    """
    from hpu_duo.lab.eval.passkey import FAILS_BELOW, full_attention

    try:
        found = full_attention(measured, tasks, load)
    except ValueError as error:
        typer.echo(f"hpu-duo: warning: full attention cannot be asked the same questions: {error}", err=True)
        return []
    able = {length: one for length, one in found.items() if one.accuracy >= FAILS_BELOW}
    if able:
        note = f"full attention answers {_counts(able)}, so wrong answers are due to the heads that stream"
        typer.echo(f"hpu-duo: {note}", err=True)
    warn_of_failures(found)
    return [{"num_tokens": length, **one.report_fields} for length, one in found.items()]


def warn_of_failures(found: Mapping[int, PasskeyResult]) -> None:
    """Name the lengths at which full attention gets most answers wrong, if there are such."""
    from hpu_duo.lab.eval.passkey import FAILS_BELOW

    failed = {length: one for length, one in found.items() if one.accuracy < FAILS_BELOW}
    if failed:
        typer.echo(
            f"hpu-duo: warning: full attention itself answers only {_counts(failed)}: the model cannot do "
            "this task, so its accuracy says nothing about heads. Shorter documents, fewer --passkey-words, "
            "a --haystack in the model's language or other --words may help.",
            err=True,
        )


def _counts(found: Mapping[int, PasskeyResult]) -> str:
    return ", ".join(
        f"{one.num_exact} of {one.num_answers} at {length:,} tokens" for length, one in found.items()
    )


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


Records = list[dict[str, Any]]
Measure = Callable[[Any], Iterable[dict[str, Any]]]
"""From a ``ResultFile``, or None, to records."""


@dataclass(frozen=True)
class Report:
    """Results of an evaluation, to be shown.

    Attributes:
        rows: lines of the table.
        columns: of the table.
        fields: the report as JSON.
        note: below the table.
    """

    rows: Sequence[Mapping[str, Any]]
    columns: Sequence[str]
    fields: Mapping[str, Any]
    note: str = NOTE


@dataclass(frozen=True)
class Evaluation:
    """A measurement.

    Attributes:
        kind: of results, for the first line of their file.
        settings: returns what the results depend on; called only where they are written.
        prepare: checks everything and loads the model, and returns what measures, record by record, those
            that are in the file left out. All that is refused is refused here.
        report: turns records into a table; the model is no longer in memory.
        files: that ``report`` writes, besides the report itself.
    """

    kind: str
    settings: Callable[[], dict[str, Any]]
    prepare: Callable[[], Measure]
    report: Callable[[Records], Report]
    files: tuple[str, ...] = ()

    def run(self, out: Path | None, as_json: bool) -> None:
        """Run it.

        Args:
            out: directory of the results; None writes nothing.
            as_json: print one JSON object in place of a table.
        """
        with user_errors():
            from hpu_duo.lab.eval import ResultFile, ResultsNotWrittenError

            results = None
            if out is not None:
                check_outputs(out / RESULTS, [out / name for name in (*self.files, REPORT)])
                results = ResultFile(out / RESULTS, self.kind, self.settings())
            measure = self.prepare()
        with user_errors(ResultsNotWrittenError):
            records = list(measure(results))
            # One model at a time in memory, where the report needs another one.
            del measure
            found = self.report(records)
            if not as_json:
                show(found.rows, found.columns, found.note)
            finish(found.fields, out, as_json)
