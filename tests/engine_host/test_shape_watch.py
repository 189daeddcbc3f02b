"""Traffic that a table was not planned for is told once, with the command that plans another."""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from graphs import BatchShape, BucketTable, SkippingCost, StepCost, StepLimits
from graphs.bucket_file import read_shapes
from graphs.table import PlannedPadding
from hpu_duo.engine.telemetry import Replanning, ShapeWatch

LIMITS = StepLimits(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=512,
    block_size=16,
    num_blocks=100,
    decode_len=3,
    max_chunk_rows=1,
)
SMALL, LARGE = BatchShape.parse("--u/q1/s0/u1/l1"), BatchShape.parse("--u/q8/s0/u100/l8")
PREFILL = BatchShape.parse("c--/q64/s0/u0/l1")
COST = StepCost(block_size=16, operations_per_launch=0.0, operations_per_byte=4.0)
TABLE = BucketTable((LARGE, PREFILL), COST, PlannedPadding.by(COST, 0.05))
WINDOW = 16


def watch(table: BucketTable = TABLE) -> ShapeWatch:
    return ShapeWatch(lambda: table, Replanning("a model", LIMITS), WINDOW)


def test_far_more_padding_than_promised_is_told_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    watched = watch()
    watched.recording = tmp_path / "shapes.jsonl"
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * WINDOW):
            watched.add(SMALL, LARGE)
    drift = watched.drift
    assert drift is not None
    assert drift.promised == 0.05
    assert drift.seen == pytest.approx(COST(LARGE) / COST(SMALL) - 1)
    assert drift.num_steps == WINDOW
    words = shlex.split(drift.command)
    assert words[:2] == ["hpu-duo", "plan"]
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert options["--model"] == "a model"
    assert options["--from-shapes"] == str(tmp_path / "shapes.jsonl")
    assert (options["--graphs-budget"], options["--num-blocks"]) == ("2", "100")
    assert options["--decode-len"] == "3"
    assert [record.getMessage() for record in caplog.records] == [str(drift)]


def test_another_table_is_judged_by_its_own_planned_padding() -> None:
    tables = [TABLE]
    watched = ShapeWatch(lambda: tables[-1], Replanning("a model", LIMITS), WINDOW)
    for _ in range(WINDOW):
        watched.add(SMALL, LARGE)
    assert watched.drift is not None
    tables.append(replace(TABLE, planned_padding=PlannedPadding.by(COST, 100.0)))
    watched.restart()
    for _ in range(WINDOW):
        watched.add(SMALL, LARGE)
    assert watched.drift is None


def test_without_a_recording_the_sample_is_written_for_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    watched = watch()
    for number in range(WINDOW):
        watched.add(PREFILL if number == 3 else SMALL, PREFILL if number == 3 else LARGE)
    assert watched.drift is not None
    words = shlex.split(watched.drift.command)
    recording = words[words.index("--from-shapes") + 1]
    assert Path(recording).parent == tmp_path
    assert read_shapes(recording) == {SMALL: WINDOW - 1, PREFILL: 1}


@pytest.mark.parametrize(
    "table",
    [
        replace(TABLE, planned_padding=None),
        replace(TABLE, planned_padding=PlannedPadding.by(COST, 100.0)),
        replace(TABLE, planned_padding=PlannedPadding.by(SkippingCost(), 0.05)),
    ],
)
def test_nothing_is_told_of_a_table_that_promised_nothing_else(table: BucketTable) -> None:
    watched = watch(table)
    for _ in range(2 * WINDOW):
        watched.add(SMALL, LARGE)
    assert watched.drift is None
    assert watched.reservoir.num_steps == 2 * WINDOW


def test_steps_that_fit_are_no_drift_and_less_than_a_window_is_not_judged() -> None:
    watched = watch()
    for _ in range(2 * WINDOW):
        watched.add(LARGE, LARGE)
    for _ in range(WINDOW - 1):
        watched.add(SMALL, LARGE)
    assert watched.drift is None
    watched.add(SMALL, LARGE)
    assert watched.drift is not None
