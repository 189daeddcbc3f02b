"""Warnings when full attention fails too: the accuracy then says nothing about heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from hpu_duo.eval import PasskeyResult, PasskeyTask, Subject


def ask_full_attention(
    measured: Mapping[int, PasskeyResult],
    tasks: Mapping[int, Sequence[PasskeyTask]],
    load: Callable[[], Subject] | None,
) -> list[dict[str, Any]]:
    """Rows of full attention for lengths at which most answers were wrong, and a warning where it fails too.

    Args:
        measured, tasks, load: see ``hpu_duo.eval.control.full_attention``.
    """
    from hpu_duo.eval.control import FAILS_BELOW, full_attention

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
    from hpu_duo.eval.control import FAILS_BELOW

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
