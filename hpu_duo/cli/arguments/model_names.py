"""Values of ``--model``: a directory, or the id of a model on the hub, with a revision behind ``@``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from hpu_duo.cli.terminal.errors import user_errors


def model_option(help: str, *, needs_weights: bool = True, **options: Any) -> Any:
    """Make the option of a command that takes a model; an id arrives as the directory of its files.

    Args:
        needs_weights: False where config.json is enough.
        options: of ``typer.Option``.
    """

    def find(given: Path | None) -> Path | None:
        # What is no id is for the command to refuse, after what it checks first.
        if given is None or given.is_absolute() or given.exists():
            return given
        # Slow to import, and only ids need it.
        from hpu_duo.modeling.hub import find_checkpoint, is_id, split_revision

        name, revision = split_revision(str(given))
        if not is_id(name):
            return given
        with user_errors():
            return find_checkpoint(name, revision, needs_weights=needs_weights)

    return typer.Option(
        parser=_path,
        callback=find,
        metavar="DIR|ID",
        help=f"{help} Or ORG/NAME[@REVISION] on the hub.",
        **options,
    )


def _path(text: str | Path) -> Path:
    # An empty path would be the current directory.
    with user_errors():
        if not str(text):
            raise ValueError("expected a directory or the id of a model, got ''")
    return Path(text)
