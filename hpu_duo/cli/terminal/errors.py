"""Ends of commands that cannot go on: a sentence on stderr and an exit code, never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

BAD_INPUT = 2
INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


@contextmanager
def user_errors(kind: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[None]:
    """End the command with a sentence if the user's request cannot be carried out.

    To be put around reading and checking, not around running: a ``ValueError`` from a step that was
    accepted is a bug of this package, and keeps its traceback.

    Args:
        kind: the errors that are the user's. ``()`` is none of them, so that only interruptions are handled.
    """
    try:
        yield
    except kind as error:
        typer.echo(f"hpu-duo: error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        typer.echo("hpu-duo: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
