"""Checks before long work that its results can be written."""

from __future__ import annotations

import tempfile
from pathlib import Path


def check_directory(name: str, directory: Path) -> None:
    """Check that files can be created in a directory, which is created later with its parents if needed.

    Args:
        name: of the directory in the message.

    Raises:
        ValueError: they cannot.
    """
    try:
        _make_a_file(directory)
    except OSError as error:
        raise ValueError(
            f"expected {name} to be a directory that can be written to, got {directory}: {error.strerror}"
        ) from None


def check_file(name: str, file: Path, *, makes_parents: bool = False) -> None:
    """Check that a file can be written, anew or in place of an existing one.

    Args:
        name: of the file in the message.
        makes_parents: whether its directory is created later if it does not exist.

    Raises:
        ValueError: it cannot, or the path is no file.
    """
    expected = f"expected {name} to be a file in a directory that can be written to, got {file}"
    try:
        if file.exists():
            if not file.is_file():
                raise ValueError(f"{expected}, which is something else")
            with file.open("ab"):
                pass
        elif not makes_parents and not file.parent.exists():
            raise ValueError(f"{expected}: {file.parent} does not exist")
        _make_a_file(file.parent)
    except OSError as error:
        raise ValueError(f"{expected}: {error.strerror}") from None


def _make_a_file(directory: Path) -> None:
    """Create an unnamed file there, or in the nearest existing parent: permissions alone are not enough."""
    above = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    with tempfile.TemporaryFile(dir=above):
        pass
