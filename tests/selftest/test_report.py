"""Reports of a self-test name no machine or user, and a self-test ends in time."""

from __future__ import annotations

import json
import socket
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpu_duo.lab.selftest.finding import Finding, Notes
from hpu_duo.lab.selftest.machine import describe_machine
from hpu_duo.lab.selftest.report import Report, StageResult
from hpu_duo.lab.selftest.selftest import run_stages
from hpu_duo.lab.selftest.stages import Stage
from hpu_duo.lab.selftest.subject import Subject
from tests.selftest import misbehaving

ROOT = Path(__file__).parents[2]


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.corp.example")
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("LOGNAME", "alice")


@pytest.mark.usefixtures("private")
def test_a_report_names_neither_host_nor_user(tmp_path: Path) -> None:
    details = (
        "logs in /home/alice/logs",
        "/scratch/alice/x on node7",
        "node7.corp.example:8000",
        "node70, malice",
        "connect to [10.1.2.3]:22 and 52.1.2.3:22 and 192.168.0.7 at 0a:1b:2c:3d:4e:5f",
        "habana-torch-plugin 1.24.1.5, bus 0000:33:00.0, 10:20:30",
    )
    findings = tuple(Finding("fact", None, detail) for detail in details)
    error = 'File "/home/alice/venv/x.py"\nsocket.gaierror: node7'
    stage = StageResult("machine", "Machine", 1.0, findings, error)
    subject = Subject("cpu", Path("/home/alice/models/llama"))
    report = Report(subject, datetime.now(timezone.utc), (stage,)).without_names()
    assert [finding.detail for finding in report.stages[0].findings] == [
        "logs in ~/logs",
        "/scratch/USER/x on HOST",
        "HOST:8000",
        "node70, malice",
        "connect to [ADDRESS]:22 and ADDRESS:22 and ADDRESS at ADDRESS",
        "habana-torch-plugin 1.24.1.5, bus 0000:33:00.0, 10:20:30",
    ]
    for path in report.write(tmp_path):
        text = path.read_text(encoding="utf-8").replace("malice", "")
        assert "alice" not in text
        assert "corp" not in text
    assert json.loads((tmp_path / "selftest.json").read_text())["subject"]["model"] == "~/models/llama"


def test_variables_with_addresses_are_only_said_to_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_COMM_ID", "10.1.2.3:5555")
    monkeypatch.setenv("HCCL_OVER_OFI", "1")
    path = tmp_path / "notes.jsonl"
    describe_machine(Subject("cpu"), Notes(path))
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found: dict[str, Any] = {
        one["finding"]["name"]: one["finding"]["detail"] for one in lines if "finding" in one
    }
    assert found["variable: HCCL_COMM_ID"] == "is set"
    assert found["variable: HCCL_OVER_OFI"] == "1"


def test_what_has_not_begun_in_time_is_not_run() -> None:
    stages = [
        Stage(name, name, run) for name, run in (("hang", misbehaving.hangs), ("good", misbehaving.good))
    ]
    first, second = run_stages(Subject("cpu"), stages, 60.0, deadline_s=2.0)
    assert first.error is not None
    assert first.error.startswith("its process ended")
    assert second.error == "not run: the 2 seconds of all stages were over"


def test_the_form_for_a_report_asks_for_both_files() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "selftest.yml").read_text(encoding="utf-8"))
    labels = {one["attributes"].get("label") for one in form["body"]}
    assert {"selftest.md", "selftest.json"} <= labels
