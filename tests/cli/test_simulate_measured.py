"""``hpu-duo simulate --step-times``: which limits of the measured engine hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from graphs import BatchShape, Phase, StepLimits
from hpu_duo.lab.simulate.step_times import StepTimes

Run = Callable[..., Result]
LIMITS = StepLimits(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=256,
    block_size=8,
    num_blocks=96,
    decode_len=1,
    max_chunk_rows=2,
)
KEPT = {"caches_prefixes": True, "num_snapshots": 3, "max_block_moves": 5}
NONE = {"caches_prefixes": False, "num_snapshots": 0, "max_block_moves": 0}
CHATS = ("--workload", "chats:per_s=10,turns=4,messages=20,outputs=5,system_len=32", "--num-requests", 24)


def _simulated(hpu_duo: Run, path: Path, limits: StepLimits, *options: object) -> dict[str, Any]:
    shape = BatchShape(Phase.parse("csu"), 32, 96, 96, 4)
    StepTimes.of([(shape, 0.01)], limits).write(path / "steps.json")
    result = hpu_duo("simulate", "--step-times", path / "steps.json", *CHATS, "--json", *options)
    assert result.exit_code == 0, result.stderr
    fields: dict[str, Any] = json.loads(result.stdout)
    return fields


@pytest.mark.parametrize(
    "fields",
    [NONE, KEPT, {**KEPT, "num_snapshots": 0}, {**KEPT, "uses_rows": False, "num_snapshots": 0}],
    ids=["no cache", "three snapshots", "no snapshots", "blocks only"],
)
def test_the_limits_of_the_measured_engine_hold(hpu_duo: Run, tmp_path: Path, fields: dict[str, Any]) -> None:
    limits = replace(LIMITS, **fields)
    found = _simulated(hpu_duo, tmp_path, limits)
    assert found["limits"] == json.loads(json.dumps(asdict(limits)))
    can_hit = limits.caches_prefixes and (limits.num_snapshots > 0 or not limits.uses_rows)
    assert (found["runs"][0]["prefix_hit_rate"] > 0) is can_hit


@pytest.mark.parametrize(
    ("measured", "options", "expected"),
    [
        (KEPT, ("--no-enable-prefix-caching",), NONE),
        (KEPT, ("--enable-prefix-caching",), KEPT),
        (KEPT, ("--num-prefix-snapshots", 2), {**KEPT, "num_snapshots": 2}),
        (KEPT, ("--max-num-seqs", 3), {**KEPT, "max_num_seqs": 3}),
        (NONE, ("--no-enable-prefix-caching",), NONE),
        (NONE, ("--enable-prefix-caching",), {**NONE, "caches_prefixes": True, "num_snapshots": 4}),
        (
            NONE,
            ("--enable-prefix-caching", "--num-prefix-snapshots", 2),
            {**NONE, "caches_prefixes": True, "num_snapshots": 2},
        ),
    ],
)
def test_options_replace_limits_of_the_measured_engine(
    hpu_duo: Run,
    tmp_path: Path,
    measured: dict[str, Any],
    options: tuple[object, ...],
    expected: dict[str, Any],
) -> None:
    found = _simulated(hpu_duo, tmp_path, replace(LIMITS, **measured), *options)
    assert found["limits"] == json.loads(json.dumps(asdict(replace(LIMITS, **expected))))


@pytest.mark.parametrize(
    ("measured", "options"),
    [(NONE, ()), (KEPT, ("--no-enable-prefix-caching",)), (NONE, ("--no-enable-prefix-caching",))],
)
def test_snapshots_without_a_cache_are_refused(
    hpu_duo: Run, tmp_path: Path, measured: dict[str, Any], options: tuple[object, ...]
) -> None:
    shape = BatchShape(Phase.parse("csu"), 32, 96, 96, 4)
    StepTimes.of([(shape, 0.01)], replace(LIMITS, **measured)).write(tmp_path / "steps.json")
    result = hpu_duo(
        "simulate", "--step-times", tmp_path / "steps.json", *CHATS, "--num-prefix-snapshots", 2, *options
    )
    assert result.exit_code == 2
    assert "expected --num-prefix-snapshots with --enable-prefix-caching" in result.stderr
