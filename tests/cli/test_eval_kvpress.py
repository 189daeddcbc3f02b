"""``hpu-duo eval kvpress``: tables side by side, resumed, and what is refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Run = Callable[..., Result]
STAND_IN = Path(__file__).parent.parent / "eval" / "stand_in"
SMALL = ("--num-tokens", "400", "--num-documents", "1", "--num-passkeys", "2", "--budgets", "0.2")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str | Path, ...]:
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    return ("eval", "kvpress", "--out", tmp_path / "out", "--kvpress-python", sys.executable, *SMALL)


@pytest.mark.slow
def test_rows_of_both_systems_stand_side_by_side_and_are_not_measured_twice(
    hpu_duo: Run, command: tuple[str | Path, ...], tmp_path: Path
) -> None:
    options = ("--policies", "streaming-llm", "local", "--prompts", "chunks", "whole", "--tasks", "passkey")
    done = hpu_duo(*command, *options, "--json")
    assert done.exit_code == 0, done.output
    assert "kvpress has no counterpart of local" in done.stderr
    report = json.loads(done.stdout)
    assert report["kvpress"]["kvpress"] == "0.0"
    told = [(row["policy"], row["system"], row["is_worse"] is None) for row in report["rows"]]
    assert told == [
        ("streaming-llm", "hpu-duo, chunks", False),
        ("local", "hpu-duo, chunks", True),
        ("streaming-llm", "hpu-duo, whole", False),
        ("local", "hpu-duo, whole", True),
        ("full", "hpu-duo", False),
    ]
    full = report["rows"][-1]
    assert (full["value"], full["kvpress_value"], full["kvpress_kv_ratio"]) == (1.0, 1.0, 1.0)
    assert 0.2 < report["rows"][0]["kvpress_kv_ratio"] < 0.3
    results = (tmp_path / "out" / "results.jsonl").read_text()
    assert len(results.splitlines()) == 1 + 2 + 1 + 4
    assert (tmp_path / "out" / "table.md").read_text().startswith("### passkey")
    again = hpu_duo(*command, *options)
    assert again.exit_code == 0, again.output
    assert "kvpress value" in again.stdout
    assert (tmp_path / "out" / "results.jsonl").read_text() == results


def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    hpu_duo: Run, command: tuple[str | Path, ...], tmp_path: Path
) -> None:
    for wrong, told in (
        (("--policies", "duo"), "expected kv_policy to be one of"),
        (("--prompts", "half"), "expected --prompts chunks, whole or both, got 'half'"),
        (("--tasks", "chess"), "expected tasks among passkey"),
        (("--ruler-tasks", "qa_1"), "expected tasks of RULER among"),
        (("--ruler-limit", "0"), "at least 1 sample of each of RULER's tasks, got 0"),
        (("--kvpress-python", str(tmp_path / "none")), "expected a Python that has kvpress"),
        (("--num-tokens", "999999"), "got 999999; give a smaller --num-tokens"),
    ):
        refused = hpu_duo(*command, *wrong)
        assert (refused.exit_code, told in refused.stderr) == (2, True), refused.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_documents_that_cannot_hold_what_is_asked_are_refused(
    hpu_duo: Run, command: tuple[str | Path, ...]
) -> None:
    refused = hpu_duo(*command, "--num-tokens", "200", "--tasks", "rehearsed")
    assert (refused.exit_code, "4 rehearsals of each and a tail" in refused.stderr) == (2, True), (
        refused.output
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_press_that_fails_ends_the_command_with_its_last_lines(
    hpu_duo: Run, command: tuple[str | Path, ...], tmp_path: Path
) -> None:
    failed = hpu_duo(*command, "--policies", "tova", "--tasks", "passkey")
    assert failed.exit_code == 2
    assert "NotImplementedError: no such layers here" in failed.stderr
    # What was measured before is there, and the same command goes on from it.
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 2
