"""``hpu-duo simulate --replicas``: routers side by side, with losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_simulate import SMALL, WORK, Run, config_dir

__all__ = ["config_dir"]
AROUND = ("--num-requests", 40, "--num-blocks", 24, "--replicas", 2)


def test_routers_stand_side_by_side_and_lost_requests_are_sent_again(hpu_duo: Run, config_dir: Path) -> None:
    out = config_dir / "result.json"
    result = hpu_duo(
        *("simulate", "--model", config_dir, *SMALL, *WORK, *AROUND, "--router", "e2", "round-robin"),
        *("--lose-replica", "1@0.005", "--restart-seconds", 0.001, "--out", out),
    )
    assert result.exit_code == 0, result.stderr
    assert "round-robin / fcfs" in result.stdout
    assert "expected by the router" in result.stdout
    runs = json.loads(out.read_text())["runs"]
    assert [(run["router"], run["num_replicas"], run["completed"]) for run in runs] == [
        ("e2", 2, 40),
        ("round-robin", 2, 40),
    ]
    assert sum(run["num_lost"] for run in runs) > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--router", "e2"), "with --replicas"),
        (("--replicas", 0), "--replicas of 1 or more, got 0"),
        (("--replicas", 2, "--router", "nearest"), "expected router to be one of e2"),
        (("--replicas", 2, "--router", "e2", "e2"), "expected different routers"),
        (("--replicas", 2, "--lose-replica", "2@1"), "expected --lose-replica below --replicas 2, got 2"),
        (("--replicas", 2, "--lose-replica", "soon"), "NUMBER@SECONDS, got 'soon'"),
        (("--replicas", 2, "--restart-seconds", -1), "--restart-seconds of 0 or more"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    hpu_duo: Run, config_dir: Path, options: tuple[object, ...], said: str
) -> None:
    result = hpu_duo("simulate", "--model", config_dir, *SMALL, *WORK, *options)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
