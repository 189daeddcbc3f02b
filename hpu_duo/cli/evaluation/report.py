"""The result of an evaluation, as a table and as JSON: accuracy beside bytes kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from hpu_duo.cli.terminal.sizes import show_bytes
from hpu_duo.writable import check_file

REPORT = "report.json"
RESULTS = "results.jsonl"


KV_COLUMNS = ("kv_num_tokens", "held_bytes", "kv_ratio")
"""Columns of tokens and bytes in the cache, as means over the texts of a row."""
_NOTE = (
    "In brackets: 95 % intervals (Wilson). KV: tokens of a text with its answer, bytes kept of them, and "
    "their share of the bytes of full attention; means over the texts of the line."
)
_SHARES = ("kv_ratio", "retrieval_share")


def show(rows: Sequence[Mapping[str, Any]], columns: Iterable[str], note: str = _NOTE) -> None:
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
    from hpu_duo.eval.result_file import refuse_existing

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
    from hpu_duo.eval import ResultsNotWrittenError

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
