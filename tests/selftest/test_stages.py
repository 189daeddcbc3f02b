"""Stages run whatever the others do to their process, and the report says what happened."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

import pytest

from hpu_duo.lab.selftest.finding import Notes, read_notes
from hpu_duo.lab.selftest.report import Report
from hpu_duo.lab.selftest.selftest import StageResult, run_selftest, run_stages
from hpu_duo.lab.selftest.stages import Stage, stages_of
from hpu_duo.lab.selftest.subject import Subject
from tests.selftest import misbehaving

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

SUBJECT = Subject("cpu")


@pytest.fixture(scope="module")
def results(forked_ranks: None) -> dict[str, StageResult]:
    stages = [
        Stage("first", "First", misbehaving.good),
        Stage("raises", "Raises", misbehaving.raises),
        Stage("hangs", "Hangs", misbehaving.hangs),
        Stage("disagrees", "Disagrees", misbehaving.disagrees),
        Stage("dies", "Dies", misbehaving.dies),
        Stage("lazy", "Lazy", misbehaving.good, is_lazy=True),
        Stage("lazy-too", "Lazy, too", misbehaving.good, is_lazy=True),
        Stage("others", "Others take devices", misbehaving.good, is_lazy=True, holds_device=False),
    ]
    told: list[str] = []
    found = run_stages(SUBJECT, stages, stage_deadline_s=5.0, progress=told.append)
    assert told == [stage.title for stage in stages]
    return {result.name: result for result in found}


def test_every_stage_has_a_result_in_order(results: dict[str, StageResult]) -> None:
    assert list(results) == ["first", "raises", "hangs", "disagrees", "dies", "lazy", "lazy-too", "others"]
    assert [name for name, result in results.items() if result.is_ok] == [
        "first",
        "lazy",
        "lazy-too",
        "others",
    ]


def test_a_stage_that_raises_keeps_its_findings_and_its_traceback(results: dict[str, StageResult]) -> None:
    failed = results["raises"]
    assert [finding.name for finding in failed.findings] == ["before"]
    assert failed.error is not None
    assert failed.error.endswith("RuntimeError: no such operator")


def test_a_dead_process_is_told_with_what_it_was_doing(results: dict[str, StageResult]) -> None:
    dead = results["dies"]
    assert [finding.name for finding in dead.findings] == ["before"]
    assert dead.error is not None
    assert "ended at aten.fatal" in dead.error


def test_a_stage_that_takes_too_long_is_ended(results: dict[str, StageResult]) -> None:
    error = results["hangs"].error
    assert error is not None
    assert "ended at waiting for the card" in error


def test_the_mode_of_the_device_is_set_where_a_stage_needs_one(results: dict[str, StageResult]) -> None:
    modes = {name: results[name].findings[1].detail for name in ("first", "lazy")}
    assert modes == {"first": "none", "lazy": "1"}


def test_a_stage_whose_processes_take_devices_runs_where_nobody_has_taken_one(
    results: dict[str, StageResult],
) -> None:
    processes = {name: results[name].findings[2].detail for name in ("lazy", "lazy-too", "others")}
    assert processes["lazy"] == processes["lazy-too"] != processes["others"]
    for device in ("hpu", "hpu-sim", "cuda", "cpu"):
        [exchange] = [stage for stage in stages_of(device) if not stage.holds_device]
        assert exchange.name == "exchange"


def test_the_report_has_everything_twice(results: dict[str, StageResult], tmp_path: Path) -> None:
    report = Report(SUBJECT, datetime.now(timezone.utc), tuple(results.values()))
    markdown, document = report.write(tmp_path / "new" / "folder")
    text = markdown.read_text(encoding="utf-8")
    assert "| disagrees | **failed** |" in text
    assert "| sum | **failed** | expected 2, got 3 |" in text
    assert "RuntimeError: no such operator" in text
    loaded = json.loads(document.read_text(encoding="utf-8"))
    assert not loaded["is_ok"]
    assert [stage["name"] for stage in loaded["stages"]] == list(results)


def test_half_a_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    notes = Notes(path)
    notes.begin_stage("one")
    notes.check("kept", True, "yes")
    with path.open("a", encoding="utf-8") as file:
        file.write('{"finding": {"na')
    (stage,) = read_notes(path)
    assert [finding.name for finding in stage.findings] == ["kept"]
    assert stage.seconds is None


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected stages among machine, operators.*, got nonsense"):
        run_selftest(SUBJECT, only=("nonsense",))


@pytest.mark.parametrize("device", ["hpu", "hpu-sim", "cuda", "cpu"])
def test_every_device_has_every_kind_of_stage(device: str) -> None:
    names = [stage.name for stage in stages_of(device)]
    assert len(set(names)) == len(names)
    for kind in ("machine", "operators", "kernels", "capture", "generation", "timing", "exchange"):
        assert any(name.startswith(kind) for name in names)
