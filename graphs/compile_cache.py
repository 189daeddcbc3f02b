"""A compiler's cache on disk: where it is, and whether it is still the one that a manifest means.

Compiled code outlives a process in such a cache only. A file in its directory has an identifier, so a cache
that was emptied, or another one under the same path, is recognised, and so is one that is mounted elsewhere.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from graphs.atomic_file import replace_file

_NAME = ".hpu-duo-cache"


@runtime_checkable
class HasCompileCache(Protocol):
    """A capture backend whose compiler stores its code on disk."""

    def cache_directory(self) -> Path | None:
        """The directory; None if the compiler is configured to store nothing that later processes find."""
        ...


@dataclass(frozen=True)
class CompileCache:
    """A cache on disk.

    Attributes:
        directory: of the compiler.
        identifier: of its content; another one after the directory was emptied.
    """

    directory: Path
    identifier: str

    @classmethod
    def of(cls, backend: object) -> CompileCache | None:
        """Return the cache of a capture backend, which is created if there is none; None for one without.

        Raises:
            ValueError: the directory cannot be read or written.
        """
        directory = backend.cache_directory() if isinstance(backend, HasCompileCache) else None
        return None if directory is None else cls.at(directory)

    @classmethod
    def at(cls, directory: Path) -> CompileCache:
        """Return the cache in a directory, which is created if there is none.

        Raises:
            ValueError: it cannot be read or written.
        """
        file = directory / _NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            found = _read(file)
            if not found:
                replace_file(file, uuid.uuid4().hex + "\n")
                # Of two processes that create it at once, one may have an identifier that the other replaces:
                # what it notes in a manifest is then captured again.
                found = _read(file)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ValueError(f"cannot use the compiler's cache in {directory}: {reason}") from error
        return cls(directory, found)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
