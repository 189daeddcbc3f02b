"""The result of an evaluation, as a table and as JSON: accuracy beside bytes kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hpu_duo.cli.terminal.sizes import show_bytes
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.lab.eval import PasskeyResult, PasskeyTask, ResultFile, Subject
    from hpu_duo.lab.eval.answering import Question

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
        help="Last tokens of each prompt that are decoded one by one; DuoAttention's LongBench runs take 50.",
    ),
]
ChatTemplate = Annotated[
    bool, typer.Option("--chat-template", help="Put prompts into the model's chat template.")
]
Limit = Annotated[
    int | None,
    typer.Option(help="Ask only the first questions of each file.", show_default="all of them"),
]
_GROUPS = ("task", "dataset", "group", "length_bucket", "num_tokens")


def check_simulated_decodes(num_decoded: int) -> None:
    """Refuse a number of simulated decodes that is not at least 1, the default."""
    if num_decoded < 1:
        raise ValueError(f"expected --simulated-decodes of at least 1, got {num_decoded}")


def open_results(out: Path | None, kind: str, settings: dict[str, Any]) -> ResultFile | None:
    """The file that takes the answers, if there is a directory for it.

    Raises:
        ValueError: it is of other settings, or would replace files of something else.
    """
    from hpu_duo.lab.eval import ResultFile

    if out is None:
        return None
    check_outputs(out / RESULTS, [out / REPORT])
    return ResultFile(out / RESULTS, kind, settings)


def ask(
    subject: Subject,
    num_questions: int,
    question: Callable[[int], Question],
    results: ResultFile | None,
    num_decoded: int,
) -> list[dict[str, Any]]:
    """All records, without the prompts."""
    from hpu_duo.lab.eval.answering import answered

    return list(answered(subject, num_questions, question, results, num_decoded))


def limited(items: Sequence[Any], limit: int | None) -> Sequence[Any]:
    """The first items; all of them without a limit.

    Raises:
        ValueError: the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"expected --limit of at least 1, got {limit}")
    return items[:limit]


def report(
    rows: Sequence[Mapping[str, Any]], out: Path | None, as_json: bool, more: Iterable[str] = ()
) -> None:
    """Show and write one row per group of questions.

    Args:
        more: names of further columns, before the scores.
    """
    if not as_json:
        names = [name for name in _GROUPS if name in rows[0]]
        show(rows, (*names, *more, "num_samples", "score", *KV_COLUMNS))
    finish({"tasks": list(rows)}, out, as_json)


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
