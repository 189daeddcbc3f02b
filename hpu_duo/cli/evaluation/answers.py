"""Questions that are answered freely: the file of their results, how far they are, and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpu_duo.cli.evaluation.report import KV_COLUMNS, REPORT, RESULTS, check_outputs, finish, show

if TYPE_CHECKING:
    from hpu_duo.eval import ResultFile, Subject
    from hpu_duo.eval.answering import Question

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
    from hpu_duo.eval import ResultFile

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
    from hpu_duo.eval.answering import answered

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
