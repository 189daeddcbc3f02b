"""Paths of the command line; an empty one, of an unset variable say, is refused."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer


def path(text: str | Path) -> Path:
    """Read a path; raises ``typer.BadParameter`` for an empty one, which pathlib takes for ``.``."""
    if not str(text):
        raise typer.BadParameter("expected a path, got ''")
    return Path(text)


def refuse_empty_paths(app: typer.Typer) -> None:
    """Read every path of every command of ``app``, those of its groups too, by ``path``."""
    for command in app.registered_commands:
        callback: Any = command.callback
        evaluated = signature(callback, eval_str=True)
        for parameter in evaluated.parameters.values():
            _read_by_path(parameter.annotation)
        # Once evaluated, annotations are the objects that have been changed.
        callback.__signature__ = evaluated
        callback.__annotations__ = {each.name: each.annotation for each in evaluated.parameters.values()}
    for group in app.registered_groups:
        if group.typer_instance is not None:
            refuse_empty_paths(group.typer_instance)


def _read_by_path(annotation: Any) -> None:
    if get_origin(annotation) is Annotated:
        kind, *notes = get_args(annotation)
        for note in notes:
            if _has_paths(kind) and hasattr(note, "parser"):
                note.parser = path


def _has_paths(kind: Any) -> bool:
    return kind is Path or any(map(_has_paths, get_args(kind)))
