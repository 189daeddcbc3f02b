"""Points of a curve: which are measured, once each, and how they are summed up."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpu_duo.heads import HeadPattern
from hpu_duo.lab.eval import CurveTask, KVBytes, PasskeyResult, PasskeyTask, ResultFile, curve, curve_points
from hpu_duo.lab.eval.curve import FULL, RANDOM, STREAMING, summary
from hpu_duo.lab.eval.interval import wilson

SCORES = np.array([[0.1, 0.9], [0.8, 0.2]], np.float32)
GATES = HeadPattern(SCORES, sink=4, recent=12)
OTHER = HeadPattern(SCORES[::-1], sink=4, recent=12)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[HeadPattern]:
    """Measures nothing: an answer is right for each retrieval head. Records what would have been."""
    loaded: list[HeadPattern] = []

    def accuracy(pattern: HeadPattern, task: PasskeyTask) -> PasskeyResult:
        loaded.append(pattern)
        kept = int(pattern.mask.sum())
        return PasskeyResult(4, kept, 8, 2 * kept, -1.0, KVBytes(10, 25 * kept + 1, 100))

    monkeypatch.setattr(curve, "passkey_accuracy", accuracy)
    return loaded


def run(task: CurveTask, path: Path) -> list[dict[str, Any]]:
    results = ResultFile(path, "curve", {})
    return list(curve_points(task.points(), PasskeyTask(100), lambda pattern: pattern, results))  # type: ignore[arg-type, return-value]


def test_every_curve_has_its_points_and_equal_heads_are_measured_once(
    tmp_path: Path, measured: list[HeadPattern]
) -> None:
    task = CurveTask((("gates", GATES), ("gates", OTHER), ("mass", GATES)), (0.25, 0.5), num_random=2)
    records = run(task, tmp_path / "results.jsonl")
    count = {
        label: sum(record["label"] == label for record in records) for label in (FULL, STREAMING, RANDOM)
    }
    assert count == {FULL: 1, STREAMING: 1, RANDOM: 4}
    assert [record["seed"] for record in records if record["label"] == "gates"] == [0, 0, 1, 1]
    masks = {record["mask"] for record in records}
    assert len(measured) == len(masks) < len(records)
    gates, mass = ([r for r in records if r["label"] == label] for label in ("gates", "mass"))
    assert [record["mask"] for record in gates[:2]] == ["0100", "0110"]
    assert [record["num_exact"] for record in gates[:2]] == [record["num_exact"] for record in mass]


def test_a_curve_that_was_stopped_measures_only_what_is_left(
    tmp_path: Path, measured: list[HeadPattern]
) -> None:
    task = CurveTask((("gates", GATES),), (0.25, 0.5), num_random=1, sinks=(0, 4), recents=(12, 20))
    path = tmp_path / "results.jsonl"
    whole, total = run(task, path), len(measured)
    path.write_bytes(b"\n".join(path.read_bytes().split(b"\n")[:4]) + b'\n{"label')
    assert run(task, path) == whole
    assert len(measured) <= 2 * total - 3


def test_windows_are_swept_one_at_a_time(tmp_path: Path, measured: list[HeadPattern]) -> None:
    task = CurveTask((("gates", GATES),), (0.5,), 0, sinks=(0, 8), recents=(3,), sweep_share=0.5)
    swept = [
        (r["sweep"], r["sink"], r["recent"]) for r in run(task, tmp_path / "r.jsonl") if r["sweep"] != "share"
    ]
    assert swept == [("sink", 0, 12), ("sink", 8, 12), ("recent", 4, 3)]


def test_seeds_become_a_mean_and_a_range(tmp_path: Path, measured: list[HeadPattern]) -> None:
    records = run(CurveTask((("gates", GATES),), (0.5,), num_random=3), tmp_path / "results.jsonl")
    records[-1]["num_exact"] = 4
    rows = {row["label"]: row for row in summary(records)}
    assert rows[RANDOM]["num_seeds"] == 3
    assert rows[RANDOM]["accuracy"] == pytest.approx((0.5 + 0.5 + 1.0) / 3)
    assert (rows[RANDOM]["accuracy_min"], rows[RANDOM]["accuracy_max"]) == (0.5, 1.0)
    assert rows["gates"]["kv_ratio"] == 0.51
    # Three seeds answer the same four questions.
    assert (rows[RANDOM]["num_answers"], rows[RANDOM]["num_questions"]) == (12, 4)
    found = rows[RANDOM]["accuracy_low"], rows[RANDOM]["accuracy_high"]
    assert found == wilson(rows[RANDOM]["accuracy"], 4)
    assert rows[FULL]["retrieval_share"] == 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patterns": ()}, "at least one head pattern"),
        ({"patterns": (("a", GATES), ("b", HeadPattern.all_retrieval(3, 2)))}, "2 layers x 2 KV heads"),
        ({"patterns": (("a", GATES), ("b", HeadPattern(SCORES, 4, 16)))}, "one window, 4 \\+ 12"),
        ({"patterns": ((FULL, GATES),)}, "a curve of its own"),
        ({"shares": (0.5, 1.0)}, "between 0 and 1, got 1.0"),
        ({"num_random": -1}, "num_random"),
    ],
)
def test_curves_without_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CurveTask(**{"patterns": (("a", GATES),), **values})
