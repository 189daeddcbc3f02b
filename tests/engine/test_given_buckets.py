"""Buckets that a model is loaded with: by whose cost they are ranked."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphs import BucketTable, SkippingCost, StepCost
from graphs.backends.compile import CompileBackend
from graphs.bucket_file import read_shapes, write_table
from graphs.table import PlannedPadding
from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny

TABLE = BucketTable.from_strings(["csu/q16/s64/u64/l4", "csu/q8/s64/u64/l4"])


@pytest.mark.parametrize(("attention", "kind"), [("reference", StepCost), ("sdpa", SkippingCost)])
def test_buckets_from_a_file_are_ranked_as_the_default_table_of_the_model(
    tiny: Tiny, tmp_path: Path, attention: str, kind: type
) -> None:
    write_table(tmp_path / "buckets.txt", TABLE)
    options = {"attention": attention, "pattern": PATTERN, "num_blocks": 64}
    given = tiny.load(**options, buckets=tmp_path / "buckets.txt").engine.runner.graphs.table
    default = tiny.load(**options, graphs=CompileBackend(compiler="eager")).engine.runner.graphs.table
    assert given.buckets == TABLE.buckets
    assert given.cost == default.cost
    assert isinstance(given.cost, kind)


def test_a_manifest_gives_buckets_without_a_cost(tiny: Tiny, tmp_path: Path) -> None:
    options = {
        "num_blocks": 64,
        "max_num_seqs": 1,
        "on_miss": "capture",
        "graphs": CompileBackend(compiler="eager"),
    }
    first = tiny.load(**options, buckets=TABLE.from_strings(["csu/q16/s64/u64/l1"]))
    first.warmup(manifest=tmp_path / "warm.json")
    table = tiny.load(**options, buckets=tmp_path / "warm.json").engine.runner.graphs.table
    assert table.buckets == first.engine.runner.graphs.table.buckets
    assert table.cost == tiny.load(**options).engine.runner.graphs.table.cost != StepCost(block_size=8)


def test_the_configuration_of_a_loaded_model_loads_it_again_with_its_buckets(
    tiny: Tiny, tmp_path: Path
) -> None:
    write_table(tmp_path / "buckets.txt", TABLE)
    first = tiny.load(pattern=PATTERN, num_blocks=64, buckets=tmp_path / "buckets.txt")
    again = HPUDuoModel.from_pretrained(tiny.path, first.engine_config)
    assert again.engine_config == first.engine_config
    assert again.engine.runner.graphs.table == first.engine.runner.graphs.table


def test_an_engine_tells_when_its_steps_pad_far_more_than_its_table_promises(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    table = tmp_path / "buckets.txt"
    write_table(table, TABLE, planned_padding=PlannedPadding(0.01, "SkippingCost"))
    served = tiny.load(
        attention="sdpa", num_blocks=64, buckets=table, graphs=CompileBackend(compiler="eager")
    )
    served.engine._stepper.telemetry.shapes.num_judged = 8
    assert served.stats().drift is None
    served.engine.generate([[1, 2, 3]], SamplingParams(max_tokens=10, ignore_eos=True))
    drift = served.stats().drift
    assert drift is not None
    assert drift.promised == 0.01 < drift.seen
    assert f"--model {tiny.path} " in drift.command
    (recorded,) = tmp_path.glob("hpu-duo-shapes-*.jsonl")
    assert sum(read_shapes(recorded).values()) == 8
    served.engine.write_shapes(tmp_path / "all.jsonl")
    assert sum(read_shapes(tmp_path / "all.jsonl").values()) == served.stats().num_steps == 10


def test_shapes_of_no_step_are_not_written(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got no step"):
        tiny.load().engine.write_shapes(tmp_path / "none.jsonl")


def test_a_table_with_a_cost_of_its_own_keeps_it(tiny: Tiny) -> None:
    table = BucketTable(TABLE.buckets, lambda bucket: 1.0 + bucket.query_len)
    assert tiny.load(num_blocks=64, buckets=table).engine.runner.graphs.table is table
