"""Files that are whole at any moment."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: str | Path, text: str) -> None:
    """Write a UTF-8 file so that at any moment it has either all of the old content or all of the new.

    Raises:
        OSError: it cannot be written; names ``path``. The old content is still there, and nothing beside it.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = str(target)
        raise
