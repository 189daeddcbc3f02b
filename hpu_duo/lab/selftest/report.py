"""The report of a self-test, as Markdown for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hpu_duo.lab.selftest.finding import Finding
from hpu_duo.lab.selftest.private import hide_names
from hpu_duo.lab.selftest.subject import SIMULATED, Subject
from hpu_duo.lab.selftest.timing import ROW

_SIGNS = {True: "ok", False: "**failed**", None: ""}


@dataclass(frozen=True)
class StageResult:
    """Result of a stage.

    Attributes:
        name, title: see ``Stage``.
        seconds: duration, or the deadline.
        findings: in order.
        error: why it could not be finished; None if it was.
    """

    name: str
    title: str
    seconds: float
    findings: tuple[Finding, ...]
    error: str | None

    @property
    def is_ok(self) -> bool:
        """Whether it was finished and no finding is bad."""
        return self.error is None and all(finding.is_ok is not False for finding in self.findings)


@dataclass(frozen=True)
class Report:
    """Results of a self-test.

    Attributes:
        subject: the device and model that were tested.
        began: in UTC.
        stages: in order.
    """

    subject: Subject
    began: datetime
    stages: tuple[StageResult, ...]

    @property
    def is_ok(self) -> bool:
        """Whether every stage passed."""
        return all(stage.is_ok for stage in self.stages)

    @property
    def rows(self) -> list[Any]:
        """Measured rows for the cost model."""
        findings = [finding for stage in self.stages for finding in stage.findings]
        return [finding.values[ROW] for finding in findings if ROW in finding.values]

    def without_names(self) -> Report:
        """The same without names of the machine and its user; measurements stay as they are."""
        hide = hide_names()
        return replace(
            self,
            subject=replace(self.subject, model=Path(hide(str(self.subject.model)))),
            stages=tuple(
                replace(
                    stage,
                    error=None if stage.error is None else hide(stage.error),
                    findings=tuple(replace(each, detail=hide(each.detail)) for each in stage.findings),
                )
                for stage in self.stages
            ),
        )

    def write(self, directory: Path) -> tuple[Path, Path]:
        """Write ``selftest.md`` and ``selftest.json``; returns their paths."""
        directory.mkdir(parents=True, exist_ok=True)
        paths = directory / "selftest.md", directory / "selftest.json"
        paths[0].write_text(self.as_markdown(), encoding="utf-8")
        paths[1].write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        return paths

    def as_json(self) -> dict[str, Any]:
        """All results as JSON values; ``python -m hpu_duo.planning.fit`` reads the rows."""
        return {
            "subject": {**asdict(self.subject), "model": str(self.subject.model)},
            "began": self.began.isoformat(),
            "is_ok": self.is_ok,
            "stages": [{**asdict(stage), "is_ok": stage.is_ok} for stage in self.stages],
            "rows": self.rows,
        }

    def as_markdown(self) -> str:
        """All results as Markdown: a table of stages, then the findings of each."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"# Self-test of {self.subject.device}"
        yield ""
        verdict = "passed" if self.is_ok else "**failed**"
        yield f"{self.began:%Y-%m-%d %H:%M} UTC: {verdict}."
        if self.subject.kind == SIMULATED:
            yield ""
            yield "The device is simulated: shapes and rules are checked, and times say nothing of a Gaudi."
        yield ""
        yield "| stage | result | seconds | findings |"
        yield "| --- | --- | ---: | ---: |"
        for stage in self.stages:
            result = "passed" if stage.is_ok else "**failed**"
            yield f"| {stage.name} | {result} | {stage.seconds:.1f} | {len(stage.findings)} |"
        for stage in self.stages:
            yield from _stage_lines(stage)


def _stage_lines(stage: StageResult) -> Iterator[str]:
    yield ""
    yield f"## {stage.title}"
    yield ""
    if stage.error is not None:
        yield "Not finished:"
        yield ""
        yield "```"
        yield stage.error
        yield "```"
        yield ""
    if stage.findings:
        yield "| | | |"
        yield "| --- | --- | --- |"
        # What failed is what a reader looks for.
        for finding in sorted(stage.findings, key=lambda each: each.is_ok is not False):
            yield _row(finding)


def _row(finding: Finding) -> str:
    detail = finding.detail.replace("|", "\\|").replace("\n", " ")
    return f"| {finding.name} | {_SIGNS[finding.is_ok]} | {detail} |"
