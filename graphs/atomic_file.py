"""Atomic replacement of files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def replace_file(path: str | Path, text: str) -> None:
    """Write a UTF-8 file atomically: at any moment it has either all of the old content or all of the new.

    Raises:
        OSError: it cannot be written; names ``path``. The old content is unchanged then, without temporary
            files.
    """
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Context manager for the new content of a file, which replaces the old one unless there is an error.

    Raises:
        OSError: see ``replace_file``.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(target)
        raise
