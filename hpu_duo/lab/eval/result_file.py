"""Results that survive a kill: one JSON line per finished piece of work."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FINGERPRINT = "model_fingerprint"
"""Name of the setting that identifies the model."""
_FORMAT = "hpu-duo eval 2"


class ResultsNotWrittenError(Exception):
    """A result could not be written; those before it are in the file."""


class ResultFile:
    """A file of JSON lines: the settings, then one record per finished piece of work.

    An existing file is continued only if its first line holds exactly the same settings. A last line that a
    kill left half written is cut off; a file with anything else that cannot be read is refused and left as it
    is.

    Args:
        path: created with its directory if it does not exist.
        kind: the evaluation.
        settings: everything that the results depend on, as JSON values.

    Raises:
        ValueError: the file is of other settings, or a line other than the last cannot be read. Nothing has
            been written then.
    """

    def __init__(self, path: Path, kind: str, settings: Mapping[str, Any]) -> None:
        self.path = path
        # What is compared has gone through JSON once, like what was read: tuples are lists there.
        header = json.loads(json.dumps({"format": _FORMAT, "kind": kind, "settings": dict(settings)}))
        line = json.dumps(header) + "\n"
        data = _read(path)
        self.is_new = not data
        self.records: list[dict[str, Any]] = []
        whole, _, rest = data.rpartition(b"\n")
        if data and not whole:
            if not line.encode().startswith(rest):
                raise ValueError(f"expected {path} to be a file of this evaluation, got another one")
            self.is_new = True
        elif data:
            first, *others = whole.split(b"\n")
            _check_header(path, first, header)
            self.records = [_parse(path, number, text) for number, text in enumerate(others, start=2)]
        self._start = line.encode() if self.is_new else b""
        self._num_whole = 0 if self.is_new else len(whole) + 1

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record so that it is there after a kill.

        Raises:
            ResultsNotWrittenError: the disk is full, say. The file holds the records before this one.
        """
        line = json.dumps(record) + "\n"
        try:
            self._num_whole = self._write(self._start + line.encode())
        except OSError as error:
            raise ResultsNotWrittenError(
                f"cannot write the results to {self.path}: {error.strerror}; it holds {len(self.records)} of "
                "them, and the same command goes on from there"
            ) from error
        self._start = b""
        self.records.append(json.loads(line))

    def _write(self, data: bytes) -> int:
        """Append the data after the last whole line; returns the size of the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: after a failure nothing is left that closing the file would try to write again.
        with self.path.open("r+b" if self.path.exists() else "x+b", buffering=0) as file:
            file.truncate(self._num_whole)
            file.seek(self._num_whole)
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(self._num_whole)
                raise
            return file.tell()

    def find(self, **values: Any) -> dict[str, Any] | None:
        """The record that has these values, if there is one."""
        for record in self.records:
            if all(record.get(name) == value for name, value in values.items()):
                return record
        return None


def refuse_existing(paths: Sequence[Path]) -> None:
    """Refuse to start work whose output would replace files.

    Raises:
        ValueError: one of the files exists.
    """
    found = [str(path) for path in paths if path.exists()]
    if found:
        raise ValueError(f"expected output files that do not exist yet, got {', '.join(found)}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ValueError(f"cannot read the results in {path}: {error.strerror}") from error


def _check_header(path: Path, line: bytes, wanted: dict[str, Any]) -> None:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if (
        isinstance(found, dict)
        and str(found.get("format")).startswith(_FORMAT[:-1])
        and found["format"] != _FORMAT
    ):
        raise ValueError(
            f"expected {path} to be in the format {_FORMAT!r}, got one of another version of hpu-duo"
        )
    is_ours = isinstance(found, dict) and found.get("format") == _FORMAT
    if not is_ours or found.get("kind") != wanted["kind"]:
        raise ValueError(f"expected {path} to be a file of this evaluation, got another one")
    if found == wanted:
        return
    settings, asked = found.get("settings", {}), wanted["settings"]
    names = sorted(name for name in {*settings, *asked} if settings.get(name) != asked.get(name))
    if FINGERPRINT in names and settings.get("model") == asked.get("model"):
        raise ValueError(
            f"expected {path} to hold results of the model in {asked.get('model')} as it is now, got results "
            "of another config.json or other weights"
        )
    names = [name for name in names if name != FINGERPRINT]
    other = ", ".join(f"{name}={settings.get(name)!r} (asked: {asked.get(name)!r})" for name in names)
    raise ValueError(f"expected {path} to hold results of the same settings, got {other}")


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"expected a JSON object in line {number} of {path}, got {line[:40]!r}") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object in line {number} of {path}, got {line[:40]!r}")
    return record
