"""Findings of stages, and the file that a process writes them to as it goes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One line of a report.

    Attributes:
        name: of the subject.
        is_ok: whether the finding is good; None for a plain fact.
        detail: one sentence or figure, for people.
        values: the same as JSON values.
    """

    name: str
    is_ok: bool | None
    detail: str
    values: Mapping[str, Any] = field(default_factory=dict)


class Notes:
    """Appends findings to a file, each at once, so that they are kept if the process dies.

    Args:
        path: of the file, one JSON object a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, what: str) -> None:
        """Note what is tried next, so that it can be named if the process dies."""
        self._append({"begun": what})

    def fact(self, name: str, detail: str, **values: Any) -> None:
        """Add a finding that is neither good nor bad."""
        self._append({"finding": asdict(Finding(name, None, detail, values))})

    def check(self, name: str, is_ok: bool, detail: str, **values: Any) -> None:
        """Add a finding that is good or bad."""
        self._append({"finding": asdict(Finding(name, is_ok, detail, values))})

    def begin_stage(self, name: str) -> None:
        """Begin a stage: later findings belong to it."""
        self._append({"stage": name})

    def end_stage(self, seconds: float, error: str | None) -> None:
        """End the stage; ``error`` says why it could not be finished."""
        self._append({"seconds": seconds, "error": error})

    def _append(self, entry: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


@dataclass
class StageNotes:
    """Notes of one stage.

    Attributes:
        seconds: duration; None = it has not ended.
        error: why it could not be finished.
        begun: the last thing that was tried, if no finding followed.
    """

    name: str
    findings: list[Finding] = field(default_factory=list)
    seconds: float | None = None
    error: str | None = None
    begun: str | None = None


def read_notes(path: Path) -> list[StageNotes]:
    """Read the stages of a file, in order; an unfinished last line is left out."""
    stages: list[StageNotes] = []
    for entry in _entries(path):
        if "stage" in entry:
            stages.append(StageNotes(entry["stage"]))
            continue
        stage = stages[-1]
        stage.begun = entry.get("begun")
        if "finding" in entry:
            stage.findings.append(Finding(**entry["finding"]))
        elif "seconds" in entry:
            stage.seconds, stage.error = entry["seconds"], entry["error"]
    return stages


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return
